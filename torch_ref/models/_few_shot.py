"""Few-shot models, line by line from the papers; one episode after the other.

References:
    Vinyals et al., "Matching Networks for One Shot Learning", 2016 (Conv-4); He et al., "Deep
    Residual Learning for Image Recognition", 2016; Snell et al., "Prototypical Networks for
    Few-shot Learning", 2017; Nguyen et al., "Enhancing Few-Shot Image Classification With Cosine
    Transformer", 2023.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Conv4(nn.Module):
    """``(images, channels, 16 n, 16 n) -> (images, width n n)``, places before features."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        inputs = (channels, width, width, width)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(n, width, 3, padding=1, bias=False) for n in inputs
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in inputs)

    def forward(self, x):
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.max_pool2d(norm(convolution(x)).relu(), 2)
        return x.permute(0, 2, 3, 1).flatten(1)


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.projects = stride > 1 or inputs != outputs
        if self.projects:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut_norm = nn.BatchNorm2d(outputs)

    def forward(self, x):
        short = self.shortcut_norm(self.shortcut(x)) if self.projects else x
        x = self.first_norm(self.first(x)).relu()
        return (self.second_norm(self.second(x)) + short).relu()


class ResNet(nn.Module):
    """``(images, channels, H, W) -> (images, 8 width)``, with the stem of large images or of small.

    Args:
        blocks: Of each of the four stages.
        channels: Of the images.
        width: Features of the first stage.
        large: Whether the stem has stride 2 and a pool.
    """

    def __init__(self, blocks: tuple[int, ...], channels: int, width: int, *, large: bool):
        super().__init__()
        size, stride = (7, 2) if large else (3, 1)
        self.stem = nn.Conv2d(channels, width, size, stride, padding=size // 2, bias=False)
        self.stem_norm, self.large = nn.BatchNorm2d(width), large
        found, inputs = [], width
        for stage, number in enumerate(blocks):
            for i in range(number):
                outputs = width * 2**stage
                found.append(_Block(inputs, outputs, 2 if stage > 0 and i == 0 else 1))
                inputs = outputs
        self.blocks = nn.ModuleList(found)

    def forward(self, x):
        x = self.stem_norm(self.stem(x)).relu()
        if self.large:
            x = F.max_pool2d(x, 3, 2, padding=1)
        for block in self.blocks:
            x = block(x)
        return x.mean((2, 3))


class _FewShot(nn.Module):
    """``model(support (E, N, K, C, H, W), query (E, Q, C, H, W)) -> logits (E, Q, N)``."""

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.backbone = backbone

    def forward(self, support, query):
        return torch.stack([self.episode(*e) for e in zip(support, query, strict=True)])

    def episode(self, support, query):
        """One episode: all its images are one batch of the normalisation."""
        n, k = support.shape[:2]
        features = self.backbone(torch.cat([support.flatten(0, 1), query]))
        return self.logits(features[: n * k].reshape(n, k, -1), features[n * k :])


class PrototypicalNetwork(_FewShot):
    """Minus the squared distance of each query to the mean of each class."""

    def logits(self, support, query):
        """``(N, K, D)`` and ``(Q, D)`` to ``(Q, N)``."""
        return -(query[:, None] - support.mean(1)[None]).square().sum(-1)


class CosineTransformer(_FewShot):
    """Weighted prototypes attend to each query; a cosine with one learned direction is the logit.

    Args:
        backbone: Of the images.
        width: Its features.
        n_way: Classes.
        k_shot: Images of each.
        depth: How often the block is applied.
        heads: Of the attention.
        head_size: Of each.
        hidden: Of the feed-forward layer.
    """

    def __init__(
        self, backbone: nn.Module, width: int, *, n_way: int, k_shot: int, depth: int, heads: int,
        head_size: int, hidden: int,
    ):  # fmt: skip
        super().__init__(backbone)
        self.depth, self.heads = depth, heads
        self.support_weights = nn.Parameter(torch.ones(n_way, k_shot))
        self.attention_norm = nn.LayerNorm(width)
        self.input = nn.Linear(width, heads * head_size, bias=False)
        self.output = nn.Linear(heads * head_size, width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.head_norm = nn.LayerNorm(width)
        self.head_input = nn.Linear(width, head_size)
        self.direction = nn.Parameter(torch.randn(head_size, 1))
        self.length = nn.Parameter(torch.ones(1))

    def logits(self, support, query):
        """``(N, K, D)`` and ``(Q, D)`` to ``(Q, N)``."""
        weights = self.support_weights.softmax(1)
        classes = torch.einsum("nk,nkd->nd", weights, support)[None]
        query = query[:, None]
        for _ in range(self.depth):
            classes = self.attention(classes, query) + classes
            classes = self.down(F.gelu(self.up(self.norm(classes)))) + classes
        rows = self.head_input(self.head_norm(classes))
        rows = rows / rows.norm(dim=-1, keepdim=True)
        kernel = self.length * self.direction / self.direction.norm()  # weight normalisation
        return 2.0 * (rows @ kernel).squeeze(-1)

    def attention(self, classes, query):
        """One key for each query, so no softmax: its value times a cosine."""
        c, q = (
            self.input(self.attention_norm(x)).unflatten(-1, (self.heads, -1))
            for x in (classes, query)
        )
        cosines = F.cosine_similarity(c, q, dim=-1)[..., None]
        return self.output((cosines * q).flatten(-2))
