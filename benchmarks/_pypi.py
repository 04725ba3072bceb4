"""Models of other packages, as these have them: built from a configuration, weights at random, nothing downloaded.

Each comes in the sizes that its authors trained, and small, for tests. Packages are imported when a model is asked for.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from svexport.cli._model import load_file

__all__ = ["MODELS", "Model", "like_trained"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")

Built = tuple[nn.Module, tuple[Tensor, ...]]
STAGES = ["stage1", "stage2", "stage3", "stage4"]


class Model(NamedTuple):
    """How a model is made.

    Attributes:
        package: what it comes from, by the name that it is imported by.
        build: of whether it is to be small; returns the model and inputs of batch 1.
    """

    package: str
    build: Callable[[bool], Built]


MODELS: dict[str, Model] = {}


def model(package: str) -> Callable[[Callable[[bool], Built]], Callable[[bool], Built]]:
    """Adds a builder, under its name."""

    def add(build: Callable[[bool], Built]) -> Callable[[bool], Built]:
        MODELS[build.__name__] = Model(package, build)
        return build

    return add


def like_trained(net: nn.Module) -> None:
    """Weights of the size of trained ones, none at a neutral initial value, which would hide what it is used for."""
    with torch.no_grad():
        for weight in net.parameters():
            if weight.dim() > 1:
                weight.normal_(0, weight[0].numel() ** -0.5)
            else:
                weight += 0.1 * torch.randn_like(weight)


def _transformers() -> Any:
    return importlib.import_module("transformers")


def _resnet(small: bool) -> Any:
    sizes: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1] * 4}
    sizes["layer_type"] = "basic"
    return _transformers().ResNetConfig(out_features=STAGES[1:], **(sizes if small else {}))


def _swin(small: bool) -> Any:
    sizes: dict[str, Any] = {"image_size": 64, "embed_dim": 16, "depths": [1] * 4, "num_heads": [1, 2, 2, 4]}
    sizes["window_size"] = 2
    tiny = {"image_size": 384, "drop_path_rate": 0.0}
    return _transformers().SwinConfig(out_features=STAGES, **(sizes if small else tiny))


_SMALL_DETR = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_queries": 10,
}


@model("transformers")
def hf_deformable_detr(small: bool) -> Built:
    t = _transformers()
    sizes = {"use_timm_backbone": False, "backbone": None, "backbone_config": _resnet(small), "dropout": 0.0}
    config = t.DeformableDetrConfig(**sizes, **(_SMALL_DETR if small else {}))
    return t.DeformableDetrForObjectDetection(config), (torch.randn(1, 3, *((96, 128) if small else (480, 640))),)


@model("transformers")
def hf_rt_detr_v2(small: bool) -> Built:
    t = _transformers()
    sizes: dict[str, Any] = {"anchor_image_size": None, "num_denoising": 0}
    if small:
        pyramid = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1] * 4, "layer_type": "basic"}
        backbone = t.RTDetrResNetConfig(out_features=STAGES[1:], **pyramid)
        sizes |= {"backbone_config": backbone, "encoder_hidden_dim": 32, "encoder_in_channels": [16, 24, 32]}
        sizes |= {"decoder_in_channels": [32] * 3, **_SMALL_DETR}
    return t.RTDetrV2ForObjectDetection(t.RTDetrV2Config(**sizes)), (torch.randn(1, 3, *[64 if small else 640] * 2),)


_SMALL_MASKS: dict[str, Any] = {"mask_feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 64}
_SMALL_MASKS |= {"encoder_layers": 2, "decoder_layers": 3, "num_attention_heads": 4, "dim_feedforward": 64}


@model("transformers")
def hf_mask2former(small: bool) -> Built:
    t = _transformers()
    sizes = {**_SMALL_MASKS, "feature_size": 32, "num_queries": 10} if small else {}
    config = t.Mask2FormerConfig(backbone_config=_swin(small), **sizes)
    return t.Mask2FormerModel(config), (torch.randn(1, 3, *[64 if small else 384] * 2),)


@model("transformers")
def hf_oneformer(small: bool) -> Built:
    t = _transformers()
    sizes = {**_SMALL_MASKS, "conv_dim": 32, "mask_dim": 32, "num_queries": 11} if small else {}
    config = t.OneFormerConfig(backbone_config=_swin(small), is_training=False, **sizes)
    tasks = torch.randint(1, 90, (1, config.task_seq_len))
    return t.OneFormerModel(config), (torch.randn(1, 3, *[64 if small else 384] * 2), tasks)


@model("transformers")
def hf_swin(small: bool) -> Built:
    t = _transformers()
    config = _swin(True) if small else t.SwinConfig(drop_path_rate=0.0)
    return t.SwinModel(config), (torch.randn(1, 3, config.image_size, config.image_size),)


@model("transformers")
def hf_sam(small: bool) -> Built:
    """At 512 pixels a side: at SAM's 1024 the global attentions of a training step do not fit at batch 8."""
    t = _transformers()
    size = 64 if small else 512
    vision: dict[str, Any] = {"image_size": size}
    prompt: dict[str, Any] = {"image_size": size, "image_embedding_size": size // 16}
    mask: dict[str, Any] = {}
    if small:
        vision |= {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
        vision |= {"patch_size": 8, "window_size": 4, "global_attn_indexes": [1], "mlp_dim": 64, "num_pos_feats": 8}
        prompt |= {"hidden_size": 16, "patch_size": 8, "mask_input_channels": 8, "image_embedding_size": 8}
        mask = {"hidden_size": 16, "mlp_dim": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
        mask |= {"iou_head_hidden_dim": 16}
    config = t.SamConfig(
        vision_config=t.SamVisionConfig(**vision),
        prompt_encoder_config=t.SamPromptEncoderConfig(**prompt),
        mask_decoder_config=t.SamMaskDecoderConfig(**mask),
    )
    points = torch.rand(1, 1, 2, 2) * size
    return t.SamModel(config), (torch.randn(1, 3, size, size), points, torch.ones(1, 1, 2, dtype=torch.int64))


@model("torchvision")
def torchvision_dcn(small: bool) -> Built:
    """Residual blocks of modulated deformable convolutions, as in the last stages of a DCN v2."""
    layer: Any = importlib.import_module("torchvision.ops").DeformConv2d
    channels, size = (6, 17) if small else (256, 64)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.where = nn.Conv2d(channels, 27, 3, padding=1)
            self.conv = layer(channels, channels, 3, padding=1)
            self.norm = nn.BatchNorm2d(channels)

        def forward(self, x: Tensor) -> Tensor:
            offset, mask = self.where(x).split((18, 9), 1)
            return torch.relu(x + self.norm(self.conv(x, offset, mask.sigmoid())))

    return nn.Sequential(*(Block() for _ in range(2 if small else 6))), (torch.randn(1, channels, size, size + 3),)


@model("kornia")
def kornia_warps(small: bool) -> Built:
    """An image brought into place by a homography, then by an affine map, then pixel by pixel."""
    geometry: Any = importlib.import_module("kornia.geometry.transform")
    size = (13, 18) if small else (480, 640)

    class Warps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.homography = nn.Parameter(torch.eye(3) + torch.tensor([[0.02, 0.01, 1], [0, 0.03, 0.7], [1e-4, 0, 0]]))
            self.affine = nn.Parameter(torch.tensor([[0.9, 0.1, 0.4], [-0.1, 1.1, 0.2]]))
            self.flow = nn.Conv2d(3, 2, 3, padding=1)

        def forward(self, image: Tensor) -> Tensor:
            n = image.shape[0]
            image = geometry.warp_perspective(image, self.homography.expand(n, -1, -1), size)
            image = geometry.warp_affine(image, self.affine.expand(n, -1, -1), size, padding_mode="border")
            x, y = self.flow(image).unbind(1)
            rows, columns = (torch.arange(s, device=image.device, dtype=image.dtype) for s in size)
            return geometry.remap(image, x + columns, y + rows[:, None], align_corners=True)

    return Warps(), (torch.rand(1, 3, *size),)


@model("monai")
def monai_voxelmorph(small: bool) -> Built:
    nets: Any = importlib.import_module("monai.networks.nets")
    dims, size = (2, 32) if small else (3, 64)
    sizes = (8, (8, 8, 8, 8), (8, 8)) if small else (32, (16, 32, 32, 32, 32, 32), (16, 16))
    net = nets.VoxelMorph(nets.VoxelMorphUNet(dims, 2, *sizes), integration_steps=7, spatial_dims=dims)
    return net, (torch.randn(1, 1, *[size] * dims), torch.randn(1, 1, *[size] * dims))


@model("torch")
def stgcn_kinetics(small: bool) -> Built:
    """ST-GCN of the size of Kinetics-skeleton: 150 frames of 18 joints, two people."""
    net = load_file(Path(__file__).parents[1] / "examples" / "stgcn.py").model("kinetics", frames=9 if small else 150)
    return net, net.example_inputs
