"""The table of models of `transformers` on which the checker is tried.

A row has the `model_type` of `transformers`, the numbers that make its config tiny, and how
it is called (`calls.py`). Everything else of the config is the default, dropout included;
only where a loop over experts drops elements of each expert's rows it is off, because no
draw of a rank is then a piece of one of one device.
Nothing is downloaded: the weights are drawn.

The sizes are small and different from each other and from the number of ranks, so that a
dim is not taken for another one by accident.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """One model: its `model_type`, how it is called, and what makes its config tiny."""

    name: str
    call: str
    tiny: Mapping[str, Any] = field(default_factory=dict)
    model_type: str = ""  # if it is not the name
    dtype: str = "float64"

    @property
    def type(self) -> str:
        return self.model_type or self.name


TEXT = {
    "vocab_size": 40, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 6, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 4}
MOE = {**GROUPED, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
LOCAL = {**MOE, "num_local_experts": 5}
GPT = {
    "vocab_size": 40, "n_embd": 24, "n_layer": 2, "n_head": 6, "n_positions": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {
    **TEXT, "num_key_value_heads": 6, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2, "v_head_dim": 4, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 12, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}  # fmt: skip
BART = {
    "vocab_size": 40, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 6, "decoder_attention_heads": 6, "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20, "max_position_embeddings": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
T5 = {
    "vocab_size": 40, "d_model": 24, "d_kv": 4, "d_ff": 20, "num_layers": 2,
    "num_heads": 6, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
IMAGE = {
    "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 6, "image_size": 12, "patch_size": 4,
}  # fmt: skip
STAGES = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 12,
    "depths": [2, 1],
    "num_heads": [2, 3],
    "window_size": 4,
}
CONVS = {"depths": [1, 1, 1, 1], "hidden_sizes": [6, 10, 12, 14]}
SPEECH = {
    "vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6,
    "intermediate_size": 20, "conv_dim": (10, 12), "conv_kernel": (5, 3),
    "conv_stride": (3, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 5, "num_conv_pos_embedding_groups": 3,
}  # fmt: skip

DECODERS = (
    Architecture("llama", "decoder", GROUPED),
    Architecture("mistral", "decoder", {**GROUPED, "sliding_window": 4}),
    Architecture("qwen2", "decoder", GROUPED),
    Architecture("qwen3", "decoder", GROUPED),
    Architecture("gemma", "decoder", GROUPED),
    Architecture("gemma2", "decoder", {**GROUPED, "sliding_window": 4}),
    Architecture("gemma3", "decoder", {**GROUPED, "sliding_window": 4}, "gemma3_text"),
    Architecture("phi", "decoder", GROUPED),
    Architecture("phi3", "decoder", GROUPED),
    Architecture("gpt2", "decoder", GPT),
    Architecture("gpt_neo", "decoder", {
        "vocab_size": 40, "hidden_size": 24, "num_layers": 2, "num_heads": 6, "intermediate_size": 20,
        "attention_types": [[["global", "local"], 1]], "window_size": 4, "max_position_embeddings": 32,
        "bos_token_id": 1, "eos_token_id": 2}),
    Architecture("gpt_neox", "decoder", TEXT),
    Architecture("gptj", "decoder", {**GPT, "rotary_dim": 2}),
    Architecture("gpt_bigcode", "decoder", GPT),
    Architecture("codegen", "decoder", {**GPT, "rotary_dim": 2, "n_head": 4}),
    Architecture("opt", "decoder", {**TEXT, "ffn_dim": 20, "word_embed_proj_dim": 24}),
    Architecture("bloom", "decoder", {**TEXT, "n_layer": 2, "n_head": 6}),
    Architecture("falcon", "decoder", TEXT),
    Architecture("mpt", "decoder", {"vocab_size": 40, "d_model": 24, "n_layers": 2, "n_heads": 6, "max_seq_len": 32}),
    Architecture("olmo", "decoder", GROUPED),
    Architecture("olmo2", "decoder", GROUPED),
    Architecture("stablelm", "decoder", {**GROUPED, "partial_rotary_factor": 0.5}),
    Architecture("starcoder2", "decoder", GROUPED),
    Architecture("cohere", "decoder", GROUPED),
    Architecture("cohere2", "decoder", {**GROUPED, "sliding_window": 4}),
    Architecture("granite", "decoder", GROUPED),
    Architecture("glm", "decoder", GROUPED),
    Architecture("glm4", "decoder", GROUPED),
    Architecture("exaone4", "decoder", {**GROUPED, "sliding_window": 4}),
    Architecture("smollm3", "decoder", GROUPED),
    Architecture("ernie4_5", "decoder", GROUPED),
    Architecture("nemotron", "decoder", GROUPED),
    Architecture("persimmon", "decoder", TEXT),
    Architecture("helium", "decoder", GROUPED),
    Architecture("olmo3", "decoder", {**GROUPED, "sliding_window": 4}),
    Architecture("seed_oss", "decoder", GROUPED),
    Architecture("arcee", "decoder", GROUPED),
    Architecture("hunyuan_dense", "decoder", GROUPED, "hunyuan_v1_dense"),
    Architecture("biogpt", "decoder", TEXT),
    Architecture("xglm", "decoder", {"vocab_size": 40, "d_model": 24, "num_layers": 2, "attention_heads": 6, "ffn_dim": 20, "max_position_embeddings": 32}, dtype="float32"),
)  # fmt: skip

_EXPERTS = (
    Architecture("mixtral", "decoder", LOCAL),
    Architecture("qwen2_moe", "decoder", {**MOE, "shared_expert_intermediate_size": 12}),
    Architecture("qwen3_moe", "decoder", MOE),
    Architecture("deepseek_v2", "decoder", {**LATENT, "topk_method": "greedy"}),
    Architecture("deepseek_v3", "decoder", LATENT),
    Architecture("olmoe", "decoder", MOE),
    Architecture("granitemoe", "decoder", LOCAL),
    Architecture("phimoe", "decoder", LOCAL),
    Architecture("jamba", "decoder", {**MOE, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_d_state": 3, "mamba_dt_rank": 3, "use_mamba_kernels": False}),
    Architecture("dbrx", "decoder", {"vocab_size": 40, "d_model": 24, "n_heads": 6, "n_layers": 2, "max_seq_len": 32,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}, "ffn_config": {"ffn_hidden_size": 12, "moe_num_experts": 5, "moe_top_k": 2, "hidden_size": 24}}),
    Architecture("gpt_oss", "decoder", {**LOCAL, "sliding_window": 4}),
    Architecture("glm4_moe", "decoder", {**MOE, "n_routed_experts": 5, "first_k_dense_replace": 1}),
    Architecture("ernie4_5_moe", "decoder", {**MOE, "moe_num_experts": 5, "moe_k": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 1}),
    Architecture("llama4", "decoder", {**LOCAL, "intermediate_size_mlp": 14, "attention_chunk_size": 4, "num_experts_per_tok": 1}, "llama4_text"),
    Architecture("hunyuan_moe", "decoder", {**MOE, "moe_topk": 2}, "hunyuan_v1_moe"),
    Architecture("minimax", "decoder", {**LOCAL, "block_size": 4}),
    Architecture("dots1", "decoder", {**MOE, "n_routed_experts": 5, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}),
    Architecture("qwen3_next", "decoder", {**MOE, "shared_expert_intermediate_size": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 4, "linear_value_head_dim": 6, "layer_types": ["linear_attention", "full_attention"]}),
)  # fmt: skip
# By default these models multiply with grouped_mm, which takes no float64.
EXPERTS = tuple(replace(one, dtype="float32") for one in _EXPERTS)

ENCODERS = (
    Architecture("bert", "encoder", TEXT),
    Architecture("roberta", "encoder", TEXT),
    Architecture("distilbert", "encoder", {"vocab_size": 40, "dim": 24, "n_layers": 2, "n_heads": 6, "hidden_dim": 20, "max_position_embeddings": 32}),
    Architecture("albert", "encoder", {**TEXT, "embedding_size": 10}),
    Architecture("electra", "encoder", {**TEXT, "embedding_size": 10}),
    Architecture("deberta", "encoder", {**TEXT, "pos_att_type": ["c2p", "p2c"], "relative_attention": True}),
    Architecture("deberta_v2", "encoder", {**TEXT, "pos_att_type": ["c2p", "p2c"], "relative_attention": True}, "deberta-v2"),
    Architecture("mpnet", "encoder", TEXT),
    Architecture("xlnet", "encoder", {"vocab_size": 40, "d_model": 24, "n_layer": 2, "n_head": 6, "d_inner": 20}, dtype="float32"),
    Architecture("modernbert", "encoder", {**TEXT, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2}),
    Architecture("longformer", "encoder", {**TEXT, "attention_window": 4}),
    Architecture("funnel", "encoder", {"vocab_size": 40, "block_sizes": [1, 1], "d_model": 24, "n_head": 6, "d_head": 4, "d_inner": 20, "num_decoder_layers": 1, "architectures": ["FunnelModel"]}),
    Architecture("fnet", "encoder", {**TEXT, "tpu_short_seq_length": 7}),
    Architecture("convbert", "encoder", {**TEXT, "embedding_size": 10, "head_ratio": 2, "conv_kernel_size": 3}),
    Architecture("camembert", "encoder", TEXT),
    Architecture("xlm_roberta", "encoder", TEXT, "xlm-roberta"),
    Architecture("ernie", "encoder", TEXT),
    Architecture("roformer", "encoder", TEXT),
    Architecture("megatron_bert", "encoder", TEXT, "megatron-bert"),
    Architecture("mobilebert", "encoder", {**TEXT, "embedding_size": 10, "intra_bottleneck_size": 12, "true_hidden_size": 12}),
)  # fmt: skip

ENCODER_DECODERS = (
    Architecture("t5", "encoder_decoder", T5),
    Architecture("mt5", "encoder_decoder", T5),
    Architecture("switch_transformers", "encoder_decoder", {**T5, "num_decoder_layers": 2, "num_experts": 5, "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1, "expert_capacity": 16, "dropout_rate": 0.0}),
    Architecture("bart", "encoder_decoder", BART),
    Architecture("mbart", "encoder_decoder", BART),
    Architecture("pegasus", "encoder_decoder", BART),
    Architecture("marian", "encoder_decoder", BART),
    Architecture("blenderbot", "encoder_decoder", BART),
    Architecture("umt5", "encoder_decoder", T5),
    Architecture("longt5", "encoder_decoder", {**T5, "local_radius": 3}),
    Architecture("m2m_100", "encoder_decoder", BART),
    Architecture("prophetnet", "encoder_decoder", {"vocab_size": 40, "hidden_size": 24, "num_encoder_layers": 2, "num_decoder_layers": 2,
        "num_encoder_attention_heads": 6, "num_decoder_attention_heads": 6, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "max_position_embeddings": 32}),
)  # fmt: skip

VISION = (
    Architecture("vit", "image", IMAGE),
    Architecture("deit", "image", IMAGE),
    Architecture("beit", "image", IMAGE),
    Architecture("swin", "large_image", STAGES),
    Architecture("convnext", "large_image", CONVS),
    Architecture("resnet", "large_image", {"embedding_size": 8, "depths": [1, 1, 1, 1], "hidden_sizes": [8, 12, 16, 20]}),
    Architecture("clip", "image_and_text", {
        "text_config": {**TEXT}, "vision_config": {**IMAGE}, "projection_dim": 14}),
    Architecture("clip_vision", "image", IMAGE, "clip_vision_model"),
    Architecture("dinov2", "image", {**IMAGE, "mlp_ratio": 1}),
    Architecture("siglip_vision", "image", IMAGE, "siglip_vision_model"),
    Architecture("segformer", "large_image", {"depths": [1, 1, 1, 1], "hidden_sizes": [6, 8, 10, 12], "num_attention_heads": [1, 2, 1, 2], "decoder_hidden_size": 10}),
    Architecture("poolformer", "large_image", CONVS),
    Architecture("swinv2", "large_image", STAGES),
    Architecture("convnextv2", "large_image", CONVS),
    Architecture("vit_mae", "image", {**IMAGE, "decoder_hidden_size": 12, "decoder_num_attention_heads": 3, "decoder_intermediate_size": 10, "decoder_num_hidden_layers": 1}),
    Architecture("pvt_v2", "large_image", {"image_size": 32, "hidden_sizes": [6, 8, 10, 12], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 1, 2]}),
)  # fmt: skip

SPEECHES = (
    Architecture("wav2vec2", "waveform", {**SPEECH, "mask_time_prob": 0.0}),
    Architecture("hubert", "waveform", {**SPEECH, "mask_time_prob": 0.0}),
    Architecture("wavlm", "waveform", {**SPEECH, "mask_time_prob": 0.0}),
    Architecture("data2vec_audio", "waveform", {**SPEECH, "mask_time_prob": 0.0, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 5}, "data2vec-audio"),
    Architecture("unispeech", "waveform", {**SPEECH, "mask_time_prob": 0.0}),
    Architecture("sew", "waveform", {**SPEECH, "mask_time_prob": 0.0, "squeeze_factor": 2}),
    Architecture("whisper", "spectrogram", {**BART, "num_mel_bins": 5, "max_source_positions": 8, "max_target_positions": 32}),
    Architecture("audio_spectrogram", "spectrum", {**IMAGE, "max_length": 16, "num_mel_bins": 8, "time_stride": 4, "frequency_stride": 4}, "audio-spectrogram-transformer"),
)  # fmt: skip

RECURRENT = (
    Architecture("mamba", "decoder", {**TEXT, "state_size": 3, "time_step_rank": 3}),
    Architecture("mamba2", "decoder", {**TEXT, "state_size": 3, "num_heads": 6, "head_dim": 8, "n_groups": 2, "chunk_size": 4}),
    Architecture("falcon_mamba", "decoder", {**TEXT, "state_size": 3, "time_step_rank": 3}),
    Architecture("rwkv", "decoder", {**TEXT, "attention_hidden_size": 24, "context_length": 32}),
    Architecture("lfm2", "decoder", {**GROUPED, "layer_types": ["conv", "full_attention"], "block_ff_dim": 20}),
    Architecture("recurrent_gemma", "decoder", {**GROUPED, "lru_width": 24, "attention_window_size": 4, "conv1d_width": 3, "num_hidden_layers": 3, "w_init_variance_scale": 0.1}),
    Architecture("bamba", "decoder", {**GROUPED, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_d_state": 3, "mamba_n_groups": 2, "mamba_chunk_size": 4, "attn_layer_indices": [1]}),
    Architecture("zamba2", "decoder", {**GROUPED, "mamba_d_state": 3, "mamba_ngroups": 1, "n_mamba_heads": 6, "mamba_headdim": 8, "chunk_size": 4, "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "mamba"], "num_mem_blocks": 1, "attention_hidden_size": 48, "attention_head_dim": 8, "use_mem_rope": True}),
)  # fmt: skip

ARCHITECTURES: tuple[Architecture, ...] = (
    *DECODERS, *EXPERTS, *ENCODERS, *ENCODER_DECODERS, *VISION, *SPEECHES, *RECURRENT,
)  # fmt: skip
