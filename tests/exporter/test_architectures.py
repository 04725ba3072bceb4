"""Other people's architectures from their packages: no line changed, random weights, small sizes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import svexport
from benchmarks._pypi import like_trained

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded: every model is built from its configuration
T = pytest.importorskip("transformers")
T.logging.set_verbosity_error()

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {"vocab_size": 99, "max_position_embeddings": 32, **SMALL}
PATCHES = {"image_size": 32, "patch_size": 8, **SMALL}
PYRAMID = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "window_size": 4}
STAGES = ["stage1", "stage2", "stage3", "stage4"]
DETR = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_queries": 10,
}

Built = tuple[nn.Module, Any]
ARCHITECTURES: dict[str, tuple[Callable[[], Built], set[str]]] = {}


def architecture(*nodes: str) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Adds a builder of a model and its arguments, and the svexport nodes that must come out of it."""

    def add(build: Callable[[], Built]) -> Callable[[], Built]:
        ARCHITECTURES[build.__name__] = build, set(nodes)
        return build

    return add


def ids(*shape: int) -> Tensor:
    return torch.randint(1, 90, shape)


def resnet(*stages: str) -> Any:
    return T.ResNetConfig(embedding_size=8, layer_type="basic", out_features=list(stages), **PYRAMID)


# ---------------------------------------------------------------- transformers: detection


@architecture("SvScaledDotProductAttention")
def detr() -> Built:
    config = T.DetrConfig(use_timm_backbone=False, backbone=None, backbone_config=resnet("stage4"), **DETR)
    return T.DetrForObjectDetection(config), torch.randn(1, 3, 64, 64)


@architecture("SvGridSample")
def deformable_detr() -> Built:
    """Two stages, boxes refined: proposals from the encoder by topk."""
    config = T.DeformableDetrConfig(
        use_timm_backbone=False,
        backbone=None,
        backbone_config=resnet(*STAGES[1:]),
        two_stage=True,
        with_box_refine=True,
        two_stage_num_proposals=10,
        **DETR,
    )
    return T.DeformableDetrForObjectDetection(config), torch.randn(1, 3, 128, 160)


@architecture("SvGridSample")
def rt_detr() -> Built:
    config = T.RTDetrConfig(
        backbone_config=T.RTDetrResNetConfig(embedding_size=8, layer_type="basic", out_features=STAGES[1:], **PYRAMID),
        encoder_hidden_dim=32,
        encoder_in_channels=[16, 24, 32],
        decoder_in_channels=[32, 32, 32],
        anchor_image_size=None,
        num_denoising=0,
        **DETR,
    )
    return T.RTDetrForObjectDetection(config), torch.randn(1, 3, 64, 64)


@architecture("SvEinsum")
def owl_vit() -> Built:
    config = T.OwlViTConfig(text_config=TEXT, vision_config=PATCHES, projection_dim=32)
    return T.OwlViTForObjectDetection(config), {"input_ids": ids(2, 7), "pixel_values": torch.randn(1, 3, 32, 32)}


# ---------------------------------------------------------------- transformers: segmentation, depth, keypoints


@architecture("SvGridSample", "SvEinsum")
def mask2former() -> Built:
    config = T.Mask2FormerConfig(
        backbone_config=T.SwinConfig(depths=[1] * 4, num_heads=[1, 2, 2, 4], out_features=STAGES, **SWIN),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=64,
        encoder_layers=1,
        decoder_layers=3,
        num_attention_heads=4,
        dim_feedforward=64,
        num_queries=10,
    )
    return T.Mask2FormerModel(config), torch.randn(1, 3, 64, 64)


@architecture()
def segformer() -> Built:
    config = T.SegformerConfig(num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=32, **PYRAMID)
    return T.SegformerForSemanticSegmentation(config), torch.randn(1, 3, 64, 64)


@architecture()
def upernet() -> Built:
    """Pools to 1, 2, 3 and 6 bins, of which 3 and 6 do not divide the map."""
    backbone = T.ConvNextConfig(out_features=STAGES, **PYRAMID)
    config = T.UperNetConfig(backbone_config=backbone, hidden_size=16, auxiliary_in_channels=24, num_labels=5)
    return T.UperNetForSemanticSegmentation(config), torch.randn(1, 3, 64, 64)


@architecture("SvEinsum")
def segment_anything() -> Built:
    config = T.SamConfig(
        vision_config=T.SamVisionConfig(
            hidden_size=32,
            output_channels=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=64,
            patch_size=8,
            window_size=4,
            global_attn_indexes=[1],
            mlp_dim=64,
            num_pos_feats=8,
        ),
        prompt_encoder_config=T.SamPromptEncoderConfig(
            hidden_size=16, image_size=64, patch_size=8, mask_input_channels=8
        ),
        mask_decoder_config=T.SamMaskDecoderConfig(
            hidden_size=16, mlp_dim=32, num_attention_heads=2, num_hidden_layers=1, iou_head_hidden_dim=16
        ),
    )
    points = {"input_points": torch.rand(1, 1, 2, 2) * 64, "input_labels": torch.ones(1, 1, 2, dtype=torch.int64)}
    return T.SamModel(config), {"pixel_values": torch.randn(1, 3, 64, 64), **points}


@architecture()
def depth_anything() -> Built:
    sizes = {**SMALL, "num_hidden_layers": 4, "image_size": 42, "patch_size": 14}
    backbone = T.Dinov2Config(mlp_ratio=2, out_features=STAGES, reshape_hidden_states=False, **sizes)
    config = T.DepthAnythingConfig(
        backbone_config=backbone,
        patch_size=14,
        reassemble_hidden_size=32,
        neck_hidden_sizes=[8, 16, 24, 32],
        fusion_hidden_size=16,
        head_hidden_size=8,
    )
    return T.DepthAnythingForDepthEstimation(config), torch.randn(1, 3, 42, 42)


@architecture("SvGridSample")
def superpoint() -> Built:
    config = T.SuperPointConfig(
        encoder_hidden_sizes=[8, 8, 16, 16], decoder_hidden_size=16, descriptor_decoder_dim=16, keypoint_threshold=0.0
    )
    return T.SuperPointForKeypointDetection(config), torch.rand(1, 3, 32, 32)


# ---------------------------------------------------------------- transformers: backbones, video, sound, series


@architecture()
def swin() -> Built:
    return T.SwinModel(T.SwinConfig(depths=[2, 2], num_heads=[2, 4], **SWIN)), torch.randn(1, 3, 32, 32)


@architecture()
def dinov2() -> Built:
    config = T.Dinov2Config(image_size=28, patch_size=7, mlp_ratio=2, **SMALL)
    return T.Dinov2Model(config), torch.randn(1, 3, 42, 42)  # another size: position embeddings are resized


@architecture()
def video_mae() -> Built:
    config = T.VideoMAEConfig(num_frames=4, tubelet_size=2, **PATCHES)
    return T.VideoMAEModel(config), torch.randn(1, 4, 3, 32, 32)


@architecture()
def wav2vec2() -> Built:
    config = T.Wav2Vec2Config(
        vocab_size=32,
        conv_dim=[16, 16],
        conv_stride=[5, 2],
        conv_kernel=[10, 3],
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        **SMALL,
    )
    return T.Wav2Vec2ForCTC(config), torch.randn(1, 800)


@architecture()
def patch_tst() -> Built:
    config = T.PatchTSTConfig(
        num_input_channels=2,
        context_length=32,
        patch_length=8,
        patch_stride=6,
        d_model=32,
        num_attention_heads=4,
        ffn_dim=64,
        num_hidden_layers=2,
    )
    return T.PatchTSTModel(config), torch.randn(1, 32, 2)


# ---------------------------------------------------------------- transformers: language


@architecture()
def bert() -> Built:
    mask = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
    return T.BertModel(T.BertConfig(**TEXT)), {"input_ids": ids(2, 9), "attention_mask": mask}


@architecture()
def clip() -> Built:
    config = T.CLIPConfig(text_config={"eos_token_id": 98, **TEXT}, vision_config=PATCHES, projection_dim=16)
    return T.CLIPModel(config), {"input_ids": ids(2, 7), "pixel_values": torch.randn(2, 3, 32, 32)}


@architecture()
def whisper() -> Built:
    config = T.WhisperConfig(
        vocab_size=99,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=20,
        **{k: v for k, v in DETR.items() if k != "num_queries"},
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return T.WhisperModel(config), {"input_features": torch.randn(1, 8, 40), "decoder_input_ids": ids(1, 4)}


@architecture()
def t5() -> Built:
    config = T.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    return T.T5ForConditionalGeneration(config), {"input_ids": ids(1, 7), "decoder_input_ids": ids(1, 4)}


@architecture()
def llama() -> Built:
    """One more token after seven: the keys and values of those come in as an object, and go out as one."""
    model = T.LlamaForCausalLM(T.LlamaConfig(num_key_value_heads=2, **TEXT)).eval()
    with torch.no_grad():
        cache = model(ids(1, 7)).past_key_values
    return model, {"input_ids": ids(1, 1), "past_key_values": cache}


# ---------------------------------------------------------------- monai, kornia


@architecture()
def swin_unetr() -> Built:
    nets = pytest.importorskip("monai.networks.nets")
    model = nets.SwinUNETR(1, 2, feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4), spatial_dims=2)
    return model, torch.randn(1, 1, 64, 64)


@architecture()
def segresnet() -> Built:
    nets = pytest.importorskip("monai.networks.nets")
    return nets.SegResNet(spatial_dims=3, init_filters=8, out_channels=2), torch.randn(1, 1, 16, 16, 16)


@architecture("SvGridSample")
def voxelmorph() -> Built:
    nets = pytest.importorskip("monai.networks.nets")
    unet = nets.VoxelMorphUNet(2, 2, unet_out_channels=8, channels=(8, 8, 8, 8), final_conv_channels=(8, 8))
    model = nets.VoxelMorph(backbone=unet, integration_steps=3, spatial_dims=2)
    return model, (torch.randn(1, 1, 32, 32), torch.randn(1, 1, 32, 32))


@architecture()
def disk() -> Built:
    return pytest.importorskip("kornia.feature").DISK(desc_dim=16), torch.randn(1, 3, 32, 32)


@architecture("SvGridSample")
def affnet() -> Built:
    """The affine shape of local features, from patches cut out by ``affine_grid`` and ``grid_sample``."""
    frames = torch.tensor([[[[5.0, 0.2, 16.0], [0.1, 4.0, 16.0]]]])
    model = pytest.importorskip("kornia.feature").LAFAffNetShapeEstimator(pretrained=False)
    return model, (frames, torch.rand(1, 1, 32, 32))


# ----------------------------------------------------------------


@pytest.mark.parametrize("opset", [11, 17, 20])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_unedited(name: str, opset: int, tmp_path) -> None:
    torch.manual_seed(0)
    build, nodes = ARCHITECTURES[name]
    model, args = build()
    like_trained(model)
    report = svexport.export(model, args, tmp_path / "m.onnx", opset=opset)
    assert report.verified
    assert report.opset == opset
    assert report.max_abs < 1e-3
    assert nodes <= set(report.traced_nodes)
    assert not [note for note in report.notes if note.startswith("traced by TorchScript")]
    if not any("_dim_" in shape for shape in report.outputs.values()):  # as of keypoints that are found
        assert "Shape" not in report.lowered_nodes
    assert {p.run for p in report.parity} > {"given"}
