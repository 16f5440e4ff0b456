"""Small real models, plain PyTorch: the programs that `overlap` is developed and shown on."""

from models.deepseek_v3 import DeepSeekV3, DeepSeekV3Config
from models.llama import Llama, LlamaConfig, LossModel
from models.moe import MoE, MoEBlock, MoEConfig

__all__ = [
    "DeepSeekV3",
    "DeepSeekV3Config",
    "Llama",
    "LlamaConfig",
    "LossModel",
    "MoE",
    "MoEBlock",
    "MoEConfig",
]
