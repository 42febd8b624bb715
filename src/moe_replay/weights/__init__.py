"""New weights on their way from the trainer to engines: whole, by chunks, by changes, by device memory."""
