"""Policy losses: one file for each, `registry.py` names them."""
