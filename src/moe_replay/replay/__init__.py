"""Record and replay: the controller of one model, and the adapters for each kind of router."""
