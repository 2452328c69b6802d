"""Small Llamas with random weights, as ordinary folders: what the runs of a comparison begin from."""

from __future__ import annotations

from pathlib import Path


def save_initial_model(folder: Path, tokenizer_folder: Path, seed: int, **sizes: int) -> None:
    """Write a model folder with its tokenizer.

    In so short a training the initial weights decide much. Matrices are scaled by their inputs, and those that write
    into the residual stream begin at zero, so that every block begins as the identity.

    Args:
        folder: to write.
        tokenizer_folder: of the tokenizer that the model gets.
        seed: of the weights.
        sizes: of ``LlamaConfig``: ``hidden_size``, ``intermediate_size``, ``num_hidden_layers``.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from logitstore.tokenizer import Tokenizer

    loaded = Tokenizer.from_folder(str(tokenizer_folder))
    config = LlamaConfig(
        vocab_size=loaded.vocab_size,
        **sizes,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=loaded.bos_ids[0],
        eos_token_id=loaded.eos_ids[0],
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" in name:
                parameter.normal_(0, 0.1)
            elif "o_proj" in name or "down_proj" in name:
                parameter.zero_()
            elif parameter.dim() == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
    model.save_pretrained(folder)
    loaded.save(folder)
