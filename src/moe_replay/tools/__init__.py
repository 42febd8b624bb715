"""Commands' engines: attribution, doctor, inspect, plan, dry run."""
