"""Options of other trainers, and what they are here: for `moe-replay convert`, and for advice on unknown options."""
