"""Training runs: `run.run(config, folder)` trains, evaluates or counts the cost, as the configuration asks."""
