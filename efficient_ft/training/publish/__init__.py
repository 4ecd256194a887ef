"""Export a run as ONNX or as an exported PyTorch program, with its preprocessing, its classes and a model card."""
