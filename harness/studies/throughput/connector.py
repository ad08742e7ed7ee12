"""A KV connector that hands every request a context of dummy values, so that decoding is timed without a prefill.

The same idea as vLLM's own `DecodeBenchConnector` (distributed/kv_transfer/kv_connector/v1): all prompt tokens but the
last are reported as computed elsewhere, so the scheduler gives the request blocks of its own and decodes at once. That
one fills the blocks of each request when it is admitted, thousands of small copies at batch 256; here the whole cache
is filled once, and a request asks for a filled context by itself, so that one engine does both kinds.
Only vLLM imports this module, by the path in `kv_transfer_config`.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)


class FilledContext(KVConnectorBase_V1, SupportsHMA):
    """Prompt tokens of a request whose `kv_transfer_params` say "is_filled" count as computed."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Fill every layer's cache, once."""
        for cache in kv_caches.values():
            fill(cache)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """(prompt tokens but the last that are not computed yet, False for: at once)."""
        if not (request.kv_transfer_params or {}).get("is_filled"):
            return 0, False
        return max(0, request.num_prompt_tokens - 1 - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing: what the blocks hold is as good as anything."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Empty."""
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """The blocks are free at once."""
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to save."""

    def wait_for_save(self) -> None:
        """Nothing to wait for."""


def fill(cache: torch.Tensor) -> None:
    """Finite values that differ: Gaussian, or codes of magnitude below 2 in a cache of bytes (E4M3)."""
    if not cache.is_cuda:
        cache.zero_() if not cache.is_floating_point() or cache.element_size() < 2 else cache.fill_(0.015)
    elif cache.is_floating_point() and cache.element_size() >= 2:
        cache.normal_(0.0, 0.5)
    else:
        cache.view(torch.uint8).random_(0, 0x40)
