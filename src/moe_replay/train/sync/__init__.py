"""Weight sync phase: new weights to the engine, and the checks that it uses them."""
