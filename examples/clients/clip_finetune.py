"""Fine-tune the image tower of CLIP (transformers) against fixed text embeddings of the class names.

The lines that end with ``# efficient-ft`` are the difference from the loop without this package. Methods are applied to
the image tower, because they support networks for images. The network is small and has random weights, so that the
example requires no download. For pretrained weights, use `CLIPModel.from_pretrained`.

    python examples/clients/clip_finetune.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F
from transformers import CLIPConfig, CLIPModel

from efficient_ft import MethodSession  # efficient-ft
from efficient_ft.data.digits import load_digits
from efficient_ft.methods import BackRazor, Method

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}


def main(methods: Sequence[Method] = (BackRazor(sparsity=0.8),), steps: int = 40, batch_size: int = 32) -> list[float]:
    """Train for some steps, and return the loss of each step."""
    torch.manual_seed(0)
    images, labels = load_digits()
    pixels = F.interpolate(torch.tensor(images, dtype=torch.float32)[:, None] / 8 - 1, scale_factor=4)
    pixels, targets = pixels.expand(-1, 3, -1, -1), torch.tensor(labels)
    vision = {**SIZES, "image_size": 32, "patch_size": 4}
    clip = CLIPModel(CLIPConfig(vision_config=vision, text_config={**SIZES, "vocab_size": 64}, projection_dim=32))
    names = torch.randint(64, (10, 8), generator=torch.Generator().manual_seed(1))  # token ids of the class names
    with torch.no_grad():
        texts = F.normalize(clip.text_projection(clip.text_model(names).pooler_output), dim=-1)
    tower, projection = clip.vision_model, clip.visual_projection
    session = MethodSession(tower, methods).apply()  # efficient-ft
    optimizer = torch.optim.AdamW([*tower.parameters(), *projection.parameters()], lr=1e-3)
    clip.train()
    losses = []
    for step in range(steps):
        chosen = torch.randint(len(pixels), (batch_size,))
        with session.step(step):  # efficient-ft
            found = F.normalize(projection(tower(pixels[chosen]).pooler_output), dim=-1)
            loss = F.cross_entropy(found @ texts.T * 20, targets[chosen])
            session.loss(loss).backward()  # efficient-ft
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
