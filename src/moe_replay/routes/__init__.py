"""Routes: what a route is, its bytes, and where each token sits."""
