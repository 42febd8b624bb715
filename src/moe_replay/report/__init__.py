"""Reports of runs and of comparisons as single HTML pages and as PNG files."""
