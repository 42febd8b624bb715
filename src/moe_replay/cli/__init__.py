"""The command `moe-replay`: one file for each of its subcommands."""
