"""Reports on runs, attributions and comparisons: self-contained HTML pages with PNG figures."""
