"""An SGLang server, by its own endpoints."""
