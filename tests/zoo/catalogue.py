"""The architectures of the zoo: smallest variants, small inputs, no weights."""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

_EXAMPLE, _OTHERS = (2, 3, 128, 128), ((1, 3, 96, 160), (3, 3, 160, 96), (2, 3, 133, 101))


@dataclasses.dataclass(frozen=True)
class Entry:
    """One model.

    library, target: as `building` takes them. conversion: timm's or torch's on the untouched model, the norm type that
    a configuration gets, or "" for none. shape, others: of the example input and of more; a size at which the network
    does not run is left out. options: changes of a configuration. architecture: a class of transformers.
    """

    library: str
    target: str
    conversion: str
    shape: tuple[int, ...] = _EXAMPLE
    others: tuple[tuple[int, ...], ...] = _OTHERS
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    architecture: str = ""

    @property
    def name(self) -> str:
        return f"{self.library}:{self.architecture or self.target}" + (
            f" ({self.conversion})" if self.conversion else ""
        )


# timm's conversion keeps the activation of timm's own batch norms, which torch's drops.
_TIMM = """
resnet18 resnet26d ecaresnet26t skresnet18 resnest14d regnetx_002 regnety_002 regnetz_005 efficientnet_b0
efficientnet_lite0 tf_efficientnet_b0 tf_efficientnetv2_b0 mixnet_s fbnetc_100 fbnetv3_b mnasnet_050 semnasnet_075
spnasnet_100 mobilenetv1_100 mobilenetv2_050 mobilenetv3_small_050 mobilenetv3_large_075
tf_mobilenetv3_small_minimal_100 mobilenetv4_conv_small lcnet_050 tinynet_e hardcorenas_a ghostnet_050 ghostnetv2_100
repghostnet_050 mobileone_s0 repvgg_a0 repvit_m0_9 fastvit_t8 mobilevit_xxs mobilevitv2_050 edgenext_xx_small
levit_128s levit_conv_128s efficientformer_l1 efficientformerv2_s0 efficientvit_b0 efficientvit_m0 poolformer_s12
poolformerv2_s12 visformer_tiny hrnet_w18_small dla34 dla46_c vovnet39a ese_vovnet19b_dw selecsls42 cspresnet50
cs3darknet_s rexnet_100 rexnetr_200 gernet_s ecaresnetlight resnet33ts lambda_resnet26t coat_lite_tiny tiny_vit_5m_224
hgnetv2_b0 mambaout_femto starnet_s1 shvit_s1 swiftformer_xs nf_regnet_b0 test_resnet test_efficientnet test_byobnet
resnetblur18 resnetaa34d eca_resnet33ts efficientnet_es efficientnet_cc_b0_4e mobilenet_edgetpu_100
inception_v3 inception_v4 inception_resnet_v2 xception65p legacy_xception pnasnet5large nasnetalarge densenet121
convmixer_768_32 cspdarknet53 darknet53 cspresnext50 halonet26t eca_botnext26ts_256 lambda_resnet26rpt_256
sebotnet33ts_256 maxvit_rmlp_pico_rw_256 crossvit_9_240 tresnet_m dpn48b dpn68 resnetrs50 resnet50d resnext26ts
seresnext26d_32x4d seresnextaa101d_32x8d skresnext50_32x4d resnetv2_50d mobilenetv5_base focalnet_tiny_srf davit_tiny
convnext_atto rdnet_tiny nextvit_small hgnet_tiny efficientnetv2_rw_t gc_efficientnetv2_rw_t mobilenetv4_hybrid_medium
coatnet_nano_rw_224 vgg11_bn xception41 bat_resnext26ts gcresnext26ts res2net50_48w_2s
"""

_TORCH = """
timm:resnet18 timm:regnetx_002 timm:hrnet_w18_small timm:ghostnet_100 timm:poolformer_s12 timm:mobilenetv3_small_075
timm:levit_128s timm:dla34 timm:repvgg_a0
torchvision:resnet18 torchvision:resnext50_32x4d torchvision:wide_resnet50_2 torchvision:mobilenet_v2
torchvision:mobilenet_v3_small torchvision:mobilenet_v3_large torchvision:shufflenet_v2_x0_5 torchvision:squeezenet1_1
torchvision:mnasnet0_5 torchvision:densenet121 torchvision:googlenet torchvision:inception_v3 torchvision:regnet_y_400mf
torchvision:regnet_x_400mf torchvision:efficientnet_b0 torchvision:efficientnet_v2_s torchvision:vgg11_bn
torchvision:convnext_tiny torchvision:maxvit_t torchvision:fcn_resnet50 torchvision:deeplabv3_mobilenet_v3_large
torchvision:deeplabv3_resnet50 torchvision:lraspp_mobilenet_v3_large torchvision:r3d_18 torchvision:r2plus1d_18
torchvision:mc3_18 torchvision:s3d
smp:Unet?encoder_name=resnet18 smp:UnetPlusPlus?encoder_name=resnet18 smp:MAnet?encoder_name=resnet18
smp:Linknet?encoder_name=resnet18 smp:FPN?encoder_name=resnet18 smp:PSPNet?encoder_name=resnet18
smp:DeepLabV3?encoder_name=resnet18 smp:DeepLabV3Plus?encoder_name=resnet18 smp:PAN?encoder_name=resnet18
smp:UPerNet?encoder_name=resnet18 smp:Segformer?encoder_name=resnet18 smp:Unet?encoder_name=mobilenet_v2
smp:Unet?encoder_name=timm-mobilenetv3_small_075 smp:Unet?encoder_name=efficientnet-b0
smp:Unet?encoder_name=densenet121 smp:Unet?encoder_name=vgg11_bn smp:Unet?encoder_name=mobileone_s0
smp:Unet?encoder_name=timm-regnetx_002 smp:FPN?encoder_name=se_resnet50 smp:FPN?encoder_name=dpn68
smp:Unet?encoder_name=tu-resnet18&decoder_attention_type='scse' smp:FPN?encoder_name=inceptionv4
smp:Unet?encoder_name=xception smp:Unet?encoder_name=mit_b0
"""

_SMALL = {"hidden_sizes": [16, 24, 32, 48], "embedding_size": 16}
_VIT = {"hidden_sizes": [32, 48, 64], "neck_hidden_sizes": [8, 16, 24, 32, 48, 64, 96]}
_LEVIT = {"image_size": 128, "hidden_sizes": [32, 64, 96], "num_attention_heads": [2, 4, 6], "key_dim": [8, 8, 8]}
_TRANSFORMERS = (
    ("ResNet", "ResNetForImageClassification", {"depths": [1, 1, 1, 1], "layer_type": "basic", **_SMALL}),
    ("RegNet", "RegNetForImageClassification", {"depths": [1, 1, 2, 1], "groups_width": 8, **_SMALL}),
    ("MobileNetV1", "MobileNetV1ForImageClassification", {"depth_multiplier": 0.25}),
    ("MobileNetV2", "MobileNetV2ForImageClassification", {"depth_multiplier": 0.35}),
    ("MobileNetV2", "MobileNetV2ForSemanticSegmentation", {"depth_multiplier": 0.35}),
    ("EfficientNet", "EfficientNetForImageClassification", {"width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640}),
    ("MobileViT", "MobileViTForImageClassification", _VIT),
    ("MobileViT", "MobileViTForSemanticSegmentation", _VIT),
    ("MobileViTV2", "MobileViTV2ForImageClassification", {"width_multiplier": 0.5}),
    ("Levit", "LevitForImageClassification", {"depths": [1, 1, 1], **_LEVIT}),
    ("PoolFormer", "PoolFormerForImageClassification", {"depths": [1, 1, 2, 1]}),
    ("Cvt", "CvtForImageClassification", {"embed_dim": [16, 32, 48], "num_heads": [1, 2, 3], "depth": [1, 2, 3]}),
    ("Segformer", "SegformerForSemanticSegmentation", {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64]}),
    ("SwiftFormer", "SwiftFormerForImageClassification", {"depths": [1, 1, 2, 1]}),
    ("HGNetV2", "HGNetV2ForImageClassification", {}),
    ("Bit", "BitForImageClassification", {"depths": [1, 1, 1, 1]}),
    ("UperNet", "UperNetForSemanticSegmentation", {}),
    ("RTDetrResNet", "RTDetrResNetBackbone", {"depths": [1, 1, 1, 1], "layer_type": "basic", **_SMALL}),
    ("TextNet", "TextNetForImageClassification", {}),
)  # fmt: skip


def _r18(*auxiliary: int, **more: Any) -> dict[str, Any]:
    """ResNet-18 in place of ResNet-50 or -101, with narrow heads."""
    small = {"backbone.depth": 18, "decode_head.in_channels": 512, "decode_head.channels": 32, "pretrained": None}
    if auxiliary:
        small |= {"auxiliary_head.in_channels": 256, "auxiliary_head.channels": 16}
    return {f"model.{key}": value for key, value in (small | more).items()}


_ANN = {"decode_head.in_channels": [256, 512], "decode_head.project_channels": 16}
_NECK = {"model.backbone.depth": 18, "model.neck.in_channels": [64, 128, 256, 512], "model.pretrained": None}
_UNET = {"model.backbone.base_channels": 8, "model.decode_head.in_channels": 8, "model.auxiliary_head.in_channels": 16}
_MMSEG = (
    ("fcn/fcn_r50-d8_4xb2-40k_cityscapes-512x1024.py", _r18(1)),
    ("pspnet/pspnet_r50-d8_4xb2-40k_cityscapes-512x1024.py", _r18(1)),
    ("deeplabv3/deeplabv3_r50-d8_4xb2-40k_cityscapes-512x1024.py", _r18(1)),
    (
        "deeplabv3plus/deeplabv3plus_r50-d8_4xb2-40k_cityscapes-512x1024.py",
        _r18(1, **{"decode_head.c1_in_channels": 64, "decode_head.c1_channels": 12}),
    ),
    ("ann/ann_r50-d8_4xb2-40k_cityscapes-512x1024.py", _r18(1, **_ANN)),
    ("apcnet/apcnet_r50-d8_4xb2-40k_cityscapes-512x1024.py", _r18(1)),
    ("ccnet/ccnet_r50-d8_4xb2-40k_cityscapes-512x1024.py", _r18(1)),
    ("danet/danet_r50-d8_4xb2-40k_cityscapes-512x1024.py", _r18(1, **{"decode_head.pam_channels": 16})),
    ("dmnet/dmnet_r50-d8_4xb2-40k_cityscapes-512x1024.py", _r18(1)),
    ("dnlnet/dnl_r50-d8_4xb2-40k_cityscapes-512x1024.py", _r18(1)),
    ("emanet/emanet_r50-d8_4xb2-80k_cityscapes-512x1024.py", _r18(1, **{"decode_head.ema_channels": 32, "decode_head.num_bases": 16})),
    ("encnet/encnet_r50-d8_4xb2-40k_cityscapes-512x1024.py", _r18(1, **{"decode_head.in_channels": [128, 256, 512]})),
    ("gcnet/gcnet_r50-d8_4xb2-40k_cityscapes-512x1024.py", _r18(1)),
    ("isanet/isanet_r50-d8_4xb2-40k_cityscapes-512x1024.py", _r18(1, **{"decode_head.isa_channels": 16})),
    ("nonlocal_net/nonlocal_r50-d8_4xb2-40k_cityscapes-512x1024.py", _r18(1)),
    ("upernet/upernet_r50_4xb2-40k_cityscapes-512x1024.py", _r18(1, **{"decode_head.in_channels": [64, 128, 256, 512]})),
    ("sem_fpn/fpn_r50_4xb2-80k_cityscapes-512x1024.py", _NECK),
    ("hrnet/fcn_hr18s_4xb2-40k_cityscapes-512x1024.py", {"model.pretrained": None}),
    ("ocrnet/ocrnet_hr18s_4xb2-40k_cityscapes-512x1024.py", {"model.pretrained": None}),
    ("fastscnn/fast_scnn_8xb4-160k_cityscapes-512x1024.py", {}),
    ("bisenetv1/bisenetv1_r18-d32_4xb4-160k_cityscapes-1024x1024.py", {}),
    ("bisenetv2/bisenetv2_fcn_4xb4-160k_cityscapes-1024x1024.py", {}),
    ("cgnet/cgnet_fcn_4xb4-60k_cityscapes-680x680.py", {}),
    ("ddrnet/ddrnet_23-slim_in1k-pre_2xb6-120k_cityscapes-1024x1024.py", {}),
    ("pidnet/pidnet-s_2xb6-120k_1024x1024-cityscapes.py", {}),
    ("stdc/stdc1_4xb12-80k_cityscapes-512x1024.py", {}),
    ("erfnet/erfnet_fcn_4xb4-160k_cityscapes-512x1024.py", {}),
    ("unet/unet-s5-d16_fcn_4xb4-40k_stare-128x128.py", _UNET),
    ("mobilenet_v2/mobilenet-v2-d8_fcn_4xb2-80k_cityscapes-512x1024.py", {"model.pretrained": None}),
    ("mobilenet_v3/mobilenet-v3-d8-scratch-s_lraspp_4xb4-320k_cityscapes-512x1024.py", {}),
    ("segformer/segformer_mit-b0_8xb1-160k_cityscapes-1024x1024.py", {}),
    ("segnext/segnext_mscan-t_1xb16-adamw-160k_ade20k-512x512.py", {}),
    ("poolformer/fpn_poolformer_s12_8xb4-40k_ade20k-512x512.py", {}),
    ("icnet/icnet_r50-d8_4xb2-80k_cityscapes-832x832.py", {}),
)  # fmt: skip

_MMSEG_OWN = (
    ("fastscnn/fast_scnn_8xb4-160k_cityscapes-512x1024.py", {}),
    ("bisenetv2/bisenetv2_fcn_4xb4-160k_cityscapes-1024x1024.py", {}),
    ("pspnet/pspnet_r50-d8_4xb2-40k_cityscapes-512x1024.py", _r18(1)),
    ("erfnet/erfnet_fcn_4xb4-160k_cityscapes-512x1024.py", {}),
)

_MMPRETRAIN = """
resnet/resnet18_8xb32_in1k.py mobilenet_v2/mobilenet-v2_8xb32_in1k.py
mobilenet_v3/mobilenet-v3-small-050_8xb128_in1k.py shufflenet_v1/shufflenet-v1-1x_16xb64_in1k.py
shufflenet_v2/shufflenet-v2-1x_16xb64_in1k.py repvgg/repvgg-A0_8xb32_in1k.py mobileone/mobileone-s0_8xb32_in1k.py
regnet/regnetx-400mf_8xb128_in1k.py seresnet/seresnet50_8xb32_in1k.py res2net/res2net50-w14-s8_8xb32_in1k.py
van/van-tiny_8xb128_in1k.py levit/levit-128s_8xb256_in1k.py efficientnet/efficientnet-b0_8xb32_in1k.py
repmlp/repmlp-base_8xb64_in1k.py cspnet/cspresnet50_8xb32_in1k.py
"""

_MMDET = """
rtmdet/rtmdet_tiny_8xb32-300e_coco.py yolox/yolox_tiny_8xb8-300e_coco.py retinanet/retinanet_r18_fpn_1x_coco.py
fcos/fcos_r50-caffe_fpn_gn-head_1x_coco.py yolo/yolov3_mobilenetv2_8xb24-320-300e_coco.py
centernet/centernet_r18_8xb16-crop512-140e_coco.py gfl/gfl_r50_fpn_1x_coco.py
"""

_ULTRALYTICS = """
yolov8n yolov8n-seg yolov8n-cls yolov8n-pose yolov5n yolo11n yolo12n yolov10n yolov9t yolov6n yolov3-tiny yolov8-ghost yolov8n-p2
"""


# These come last: one of them takes as long as several others, or has no batch norm.
_LARGE = re.compile(
    "timm:tf_|coat_|convnext|edgenext|nasnet|inception_(res|v4)|inceptionv4|densenet|mobilenetv5|dpn|maxvit|coatnet|davit|focalnet|nextvit|crossvit|rdnet|"
    "hrnet|ocrnet|res2net|xception|efficientnetv2_rw|hybrid|seresnextaa|resnetrs|tresnet|tiny_vit|efficientnet_cc|fbnetv3|"
    "UnetPlusPlus|UperNet|yolov9|yolo12|s3d|efficientnet_v2|regnetz|mambaout|cspresne"
)


def is_large(name: str) -> bool:
    return _LARGE.search(name) is not None


def entries() -> list[Entry]:
    """All of them, in the order in which they run: libraries take turns, so that a part shows something of each."""
    groups: list[list[Entry]] = [
        [_sized(Entry("timm", name, "timm")) for name in _TIMM.split()],
        [_torch(*name.split(":", 1)) for name in _TORCH.split()],
        [Entry("hf", name, "torch", options=options, architecture=cls) for name, cls, options in _TRANSFORMERS],
        [
            *(_sized(Entry("mmseg", name, "SyncBN", options=options)) for name, options in _MMSEG),
            *(Entry("mmseg", name, "MMSyncBN", options=options) for name, options in _MMSEG_OWN),
        ],
        [_sized(Entry("mmpretrain", name, "SyncBN")) for name in _MMPRETRAIN.split()],
        [Entry("mmdet", name, "SyncBN") for name in _MMDET.split()],
        [Entry("ultralytics", f"{name}.yaml", "torch") for name in _ULTRALYTICS.split()],
    ]
    ranked = [((index + 0.5) / len(group), entry) for group in groups for index, entry in enumerate(group)]
    return [entry for _, entry in sorted(ranked, key=lambda each: each[0])]


# Networks that do not run on the example's size.
_AT_224 = """
levit/levit-128s_8xb256_in1k.py repmlp/repmlp-base_8xb64_in1k.py
levit_128s levit_conv_128s efficientformer_l1 efficientformerv2_s0 visformer_tiny coat_lite_tiny
"""
_AT_256 = """
halonet26t eca_botnext26ts_256 lambda_resnet26rpt_256 sebotnet33ts_256 maxvit_rmlp_pico_rw_256 bat_resnext26ts
"""
_SIZES = {
    **dict.fromkeys(_AT_224.split(), ((2, 3, 224, 224), ((1, 3, 224, 224), (3, 3, 224, 224)))),
    **dict.fromkeys(_AT_256.split(), ((2, 3, 256, 256), ((1, 3, 256, 256), (3, 3, 256, 256)))),
    "mobilenet_v3/mobilenet-v3-d8-scratch-s_lraspp_4xb4-320k_cityscapes-512x1024.py": (
        (1, 3, 416, 416),
        ((2, 3, 416, 448),),
    ),
}


def _sized(entry: Entry) -> Entry:
    shape, others = _SIZES.get(entry.target, (entry.shape, entry.others))
    return dataclasses.replace(entry, shape=shape, others=others)


def _torch(library: str, target: str) -> Entry:
    if target in ("r3d_18", "r2plus1d_18", "mc3_18", "s3d"):
        return Entry(library, target, "torch", (2, 3, 16, 64, 64), ((1, 3, 16, 48, 80), (1, 3, 24, 64, 64)))
    return _sized(Entry(library, target, "torch"))


def find(name: str, among: Iterable[Entry] | None = None) -> Entry:
    for entry in entries() if among is None else among:
        if entry.name == name:
            return entry
    raise SystemExit(f"the zoo has no {name!r}")
