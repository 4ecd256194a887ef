"""Training, evaluation and cost of a run. The entry point is `run.run(config, folder)`."""
