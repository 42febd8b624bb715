"""Configuration of a training run: recipe file, command line, and checks before anything starts."""
