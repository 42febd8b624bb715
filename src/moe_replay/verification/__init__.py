"""Tools that show whether routes are the right ones, and how much they help."""
