"""How each kind of router is found and made to obey: one module a family of models."""
