"""Ray launcher: ranks and engines of a run as actors on a cluster."""
