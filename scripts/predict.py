"""Classes and probabilities of images, by a trained run. The same as ``efficient-ft predict``."""

from efficient_ft.cli.commands import run_command

if __name__ == "__main__":
    run_command("predict")
