"""FlashInfer's paged wrappers, with their signatures, in torch."""

import torch

from penstock.kernels.paged_attention.device_batch import DeviceBatch
from penstock.kernels.paged_attention.device_reference import paged_attention_device


class _Wrapper:
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, **options):
        assert kv_layout == "HND" and not use_cuda_graph and not float_workspace_buffer.any()

    def _plan(self, starts, indptr, indices, last_page_len, page_size, window_left, logits_soft_cap, sm_scale):
        assert all(host.device.type == "cpu" and host.dtype == torch.int32 for host in (starts, indptr, last_page_len))
        counts = indptr.diff()
        table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for row, count in enumerate(counts.tolist()):
            table[row, :count] = indices[indptr[row] : indptr[row + 1]]
        self.batch = DeviceBatch(
            block_size=page_size,
            rows=torch.arange(len(counts), dtype=torch.int32),
            query_start_loc=starts,
            seq_lens=(counts - 1) * page_size + last_page_len,
            block_table=table,
            window=None if window_left == -1 else window_left + 1,
            max_query_len=int(starts.diff().max()),
            num_tokens=int(starts[-1]),
        )
        self.scale, self.softcap = sm_scale, logits_soft_cap or 0.0

    def run(self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False):
        assert len(q) == self.batch.num_tokens
        return paged_attention_device(q, paged_kv_cache, self.batch, self.scale, self.softcap)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        pos_encoding_mode="NONE",
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        sm_scale=None,
    ):
        starts = torch.arange(len(indptr), dtype=torch.int32)
        self._plan(starts, indptr, indices, last_page_len, page_size, window_left, logits_soft_cap, sm_scale)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
    ):
        assert causal
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._plan(qo_indptr, *pages, page_size, window_left, logits_soft_cap, sm_scale)
