"""Hand-written backward pass of each operation on tensors pruned by `p` (Back Razor, Equation 3)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def by_hand_linear(p, g, x, w, b):
    return torch.einsum("bno,oi->bni", g, w), torch.einsum("bno,bni->oi", g, p(x)), g.sum((0, 1))


def by_hand_conv(p, g, x, w, b):
    columns = F.unfold(p(x), w.shape[2:], padding=1, stride=2)
    g_x = F.fold(w.flatten(1).T @ g.flatten(2), x.shape[2:], w.shape[2:], padding=1, stride=2)
    return g_x, torch.einsum("bol,bkl->ok", g.flatten(2), columns).view(w.shape), g.sum((0, 2, 3))


def by_hand_layer_norm(p, g, x, w, b, normalized=False):
    mean = x.mean(-1, keepdim=True)
    rstd = 1 / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    x_hat = p((x - mean) * rstd) if normalized else (p(x) - mean) * rstd
    h = g * w
    g_x = rstd * (h - h.mean(-1, keepdim=True) - x_hat * (h * x_hat).mean(-1, keepdim=True))
    return g_x, (g * x_hat).sum((0, 1)), g.sum((0, 1))


def by_hand_rms_norm(p, g, x, w, normalized=False):
    rstd = 1 / ((x**2).mean(-1, keepdim=True) + 1e-5).sqrt()
    x_hat = p(x * rstd) if normalized else p(x) * rstd
    h = g * w
    return rstd * (h - x_hat * (h * x_hat).mean(-1, keepdim=True)), (g * x_hat).sum((0, 1))


def by_hand_group_norm(p, g, x, w, b, normalized=False):
    x_G, whole = x.unflatten(1, (2, -1)), (2, 3, 4)
    mean = x_G.mean(whole, keepdim=True)
    rstd = 1 / (x_G.var(whole, keepdim=True, unbiased=False) + 1e-5).sqrt()
    pruned = p(((x_G - mean) * rstd).flatten(1, 2)) if normalized else p(x)
    x_hat = pruned.unflatten(1, (2, -1)) if normalized else (pruned.unflatten(1, (2, -1)) - mean) * rstd
    h = (g * w.view(-1, 1, 1)).unflatten(1, (2, -1))
    g_x = rstd * (h - h.mean(whole, keepdim=True) - x_hat * (h * x_hat).mean(whole, keepdim=True))
    return g_x.flatten(1, 2), (g * x_hat.flatten(1, 2)).sum((0, 2, 3)), g.sum((0, 2, 3))


def by_hand_product(p, g, a, b):
    return g * p(b), g * p(a)


def by_hand_matmul(p, g, a, b):
    return g @ p(b).mT, p(a).mT @ g


def by_hand_softmax(p, g, x):
    y = p(softmax(x))
    return (y * (g - (y * g).sum(-1, keepdim=True)),)


def softmax(x):
    return x.exp() / x.exp().sum(-1, keepdim=True)


def by_hand_attention(p, g, q, k, v, mask):
    probabilities = p(softmax(q @ k.mT / 2 + mask))
    g_p = g @ p(v).mT
    g_s = probabilities * (g_p - (probabilities * g_p).sum(-1, keepdim=True))
    return g_s @ p(k) / 2, g_s.mT @ p(q) / 2, probabilities.mT @ g, g_s.sum(1, keepdim=True)


def by_hand_batch_norm(p, g, x, w, b):
    mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, unbiased=False)
    x_hat, n = (p(x) - mean) / (var + 1e-5).sqrt(), x.numel() / x.shape[1]
    g_w, g_b = (g * x_hat).sum((0, 2, 3)), g.sum((0, 2, 3))
    w, spread = w.view(-1, 1, 1), (var + 1e-5).sqrt()
    return w / spread * (g - g_b.view(-1, 1, 1) / n - x_hat * g_w.view(-1, 1, 1) / n), g_w, g_b


def by_hand_frozen_batch_norm(p, g, x, w, b):
    mean, var = (t.double().view(-1, 1, 1) for t in (torch.linspace(-1, 1, 4), torch.linspace(0.5, 2, 4)))
    x_hat = (p(x) - mean) / (var + 1e-5).sqrt()
    return g * w.view(-1, 1, 1) / (var + 1e-5).sqrt(), (g * x_hat).sum((0, 2, 3)), g.sum((0, 2, 3))


def by_hand_gelu(p, g, x):
    x = p(x)
    return (g * ((1 + (x / 2**0.5).erf()) / 2 + x * (-(x**2) / 2).exp() / (2 * math.pi) ** 0.5),)


def by_hand_relu(p, g, x):
    return (g * (x > 0),)


def by_hand_normalize(p, g, x):
    norm = (x**2).sum(-1, keepdim=True).sqrt()
    y = p(x / norm)
    return ((g - y * (g * y).sum(-1, keepdim=True)) / norm,)


def by_hand_scale(p, g, x, s):
    return g * s, (g * p(x)).sum((0, 1))
