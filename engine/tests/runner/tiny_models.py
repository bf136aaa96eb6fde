"""Configurations of tiny models of every family, each with something of its own."""

MAX_MODEL_LEN = 320

LLAMA = {"vocab_size": 257, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "initializer_range": 0.2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 2.0, 4.0, 6.0],
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
WINDOWS = {
    "num_hidden_layers": 3,
    "sliding_window": 40,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
CONFIGS = {
    "llama": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "llama-7to1-llama3-tied": (
        "Llama",
        {
            "hidden_size": 112,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "head_dim": 80,
            "rope_parameters": LLAMA3_ROPE,
            "tie_word_embeddings": True,
        },
    ),
    "llama-mha-linear-bias": (
        "Llama",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 96,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    # Two groups of window layers and one of full attention over pages of one layer.
    "qwen3-windows": (
        "Qwen3",
        {
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "use_sliding_window": True,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("Qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}),
    "qwen2-yarn": ("Qwen2", {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": YARN}),
    "mistral-7to1-window": (
        "Mistral",
        {"hidden_size": 112, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 80, "sliding_window": 40},
    ),
    "gemma2": (
        "Gemma2",
        {
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 33,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 9.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 96,
            "query_pre_attn_scalar": 96,
            "sliding_window": 20,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "phi3-longrope": (
        "Phi3",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "pad_token_id": 0,
            "original_max_position_embeddings": 64,
            "rope_parameters": LONGROPE,
        },
    ),
    "olmo2": ("Olmo2", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "olmo3": ("Olmo3", HEADS | WINDOWS),
    "exaone4": ("Exaone4", HEADS | WINDOWS | {"head_dim": 32}),
    "gemma1": ("Gemma", HEADS | {"head_dim": 32}),
    "ministral": ("Ministral", HEADS | WINDOWS | {"head_dim": 16}),
    "smollm3": ("SmolLM3", HEADS | {"num_hidden_layers": 3, "no_rope_layer_interval": 2, "pad_token_id": 0}),
    "seed-oss": ("SeedOss", HEADS | {"head_dim": 32, "pad_token_id": 0}),
    "ernie4_5": ("Ernie4_5", HEADS | {"head_dim": 32, "use_bias": True, "pad_token_id": 0}),
    "granite": (
        "Granite",
        HEADS | {"attention_multiplier": 0.3, "embedding_multiplier": 5.0, "residual_multiplier": 0.4, "logits_scaling": 2.0},
    ),
    "glm": ("Glm", HEADS | {"head_dim": 32, "pad_token_id": 0}),
    "glm4": ("Glm4", HEADS | {"head_dim": 32, "pad_token_id": 0}),
    "cohere": ("Cohere", HEADS | {"logit_scale": 0.5, "attention_bias": True, "pad_token_id": 0}),
    "cohere2": ("Cohere2", HEADS | WINDOWS | {"logit_scale": 0.5, "pad_token_id": 0}),
    "starcoder2": ("Starcoder2", HEADS | {"sliding_window": 40}),
    "mixtral": ("Mixtral", HEADS | {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "Qwen2Moe",
        HEADS
        | {"num_hidden_layers": 3, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
        | {"shared_expert_intermediate_size": 56, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        HEADS
        | {"num_hidden_layers": 3, "head_dim": 32, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
        | {"norm_topk_prob": True, "decoder_sparse_step": 2},
    ),
    "glm4-moe": (
        "Glm4Moe",
        HEADS
        | {"num_hidden_layers": 3, "head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
        | {"n_shared_experts": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "use_qk_norm": True}
        | {"attention_bias": True, "pad_token_id": 0},
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {"num_hidden_layers": 3, "num_attention_heads": 4, "q_lora_rank": None, "kv_lora_rank": 24, "qk_rope_head_dim": 16}
        | {"qk_nope_head_dim": 20, "v_head_dim": 28, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
        | {"routed_scaling_factor": 1.3, "pad_token_id": 0},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {"num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": 20, "kv_lora_rank": 40}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3}
        | {"intermediate_size": 120, "moe_intermediate_size": 48, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
        | {"pad_token_id": 0, "attention_bias": True, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    # Gates and projections reach the limit.
    "gpt-oss": (
        "GptOss",
        HEADS
        | {"num_hidden_layers": 3, "head_dim": 32, "intermediate_size": 96, "num_local_experts": 6}
        | {"num_experts_per_tok": 3, "sliding_window": 40}
        | {"swiglu_limit": 0.8, "rope_parameters": YARN | {"truncate": False}},
    ),
}
LATENT = ["deepseek-v2", "deepseek-v3"]
MOE = ["mixtral", "qwen2-moe", "qwen3-moe", "glm4-moe", "gpt-oss", *LATENT]
DENSE = ["exaone4", "smollm3", "granite", "glm4", "cohere2", "starcoder2"]
"""One for each way to differ from Llama."""
