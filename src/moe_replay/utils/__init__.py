"""Small helpers that know nothing of routes."""
