"""Fine-tune or probe the image tower of CLIP (transformers) against fixed text embeddings of the class names.

A linear probe trains only the projection of the image tower. Methods that reduce tokens also accelerate a frozen tower.

The lines that end with ``# efficient-ft`` are the difference from the loop without this package. Methods are applied to
the image tower, because they support networks for images. The network is small and has random weights, so that the
example requires no download. For pretrained weights, use `CLIPModel.from_pretrained`.

    python examples/clients/clip_finetune.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F
from transformers import CLIPConfig, CLIPModel

from efficient_ft import MethodSession, methods  # efficient-ft
from efficient_ft.data.digits import load_digits

TEST = 256
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}


def main(chosen: Sequence[Any] = (), steps: int = 150, batch_size: int = 32, probe: bool = False) -> dict[str, Any]:
    """Train for some steps, and return the loss of each step and the accuracy on test images.

    If `probe` is True, train only the projection.
    """
    torch.manual_seed(0)
    images, labels = load_digits()
    pixels = F.interpolate(torch.tensor(images, dtype=torch.float32)[:, None] / 8 - 1, scale_factor=4)
    pixels, targets = pixels.expand(-1, 3, -1, -1), torch.tensor(labels)
    vision = {**SIZES, "image_size": 32, "patch_size": 8}
    clip = CLIPModel(CLIPConfig(vision_config=vision, text_config={**SIZES, "vocab_size": 64}, projection_dim=32))
    names = torch.randint(64, (10, 8), generator=torch.Generator().manual_seed(1))  # token ids of the class names
    with torch.no_grad():
        texts = clip.text_projection(clip.text_model(names).pooler_output)
        texts = F.normalize(texts - texts.mean(0), dim=-1)  # the embeddings of random weights are similar
    tower, projection = clip.vision_model, clip.visual_projection
    tower.requires_grad_(not probe)
    session = MethodSession(tower, chosen or methods.BackRazor(sparsity=0.8)).apply()  # efficient-ft
    optimizer = torch.optim.AdamW([*tower.parameters(), *projection.parameters()], lr=1e-3)
    clip.train()
    losses = []
    for step in range(steps):
        batch = torch.randint(len(pixels) - TEST, (batch_size,))  # the last images are the test set
        with session.step(step):  # efficient-ft
            embeddings = F.normalize(projection(tower(pixels[batch]).pooler_output), dim=-1)
            loss = F.cross_entropy(embeddings @ texts.T * 20, targets[batch])
            session.loss(loss).backward()  # efficient-ft
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    clip.eval()
    with torch.no_grad():
        embeddings = projection(tower(pixels[-TEST:]).pooler_output)
    accuracy = ((embeddings @ texts.T).argmax(1) == targets[-TEST:]).float().mean().item()
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, accuracy {accuracy:.1%}")
    return {"losses": losses, "accuracy": accuracy}


if __name__ == "__main__":
    main()
