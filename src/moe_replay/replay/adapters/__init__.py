"""Adapters: where the routers of each model family are and how they are driven."""
