"""Training of a run. `run.run(config, folder)` trains, evaluates or counts the cost, depending on the configuration."""
