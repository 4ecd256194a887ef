"""What is added to the model."""
