"""Does replay help, when, and by how much: the runs, their results and the figures. See README.md."""
