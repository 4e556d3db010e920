"""Routes through SGLang's own code, from its routers' top-k to the text in `meta_info`, without an engine.

Run in SGLang's environment: `python sglang_capturer.py job.json out.json`. In: `num_layers`, `dense_layers`, `top_k`,
`shared_experts` (fused, per layer), `chunk` (tokens of one forward), `overlap` (copy to the host later) and `requests`,
each with `routes` ``[tokens, layers, top_k]``, `num_prompt`, `num_new` and `start` (first row asked for). Out: `sglang`
(version) and per request of `answers` the `payload` (the text) and `extracted` (SGLang's own reading of it, flat).

SGLang's are: the capturer, its device and host buffers, the collection at the end of a request with the count of rows,
the encoding of the detokenizer, and the extractor. Ours are the surroundings: batches, slots of the KV cache and the
settings that size the buffers.
"""

import json
import os
import sys
import types
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import names
import torch
import torch.utils.flop_counter  # looks into triton, so before that is a name

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
# torchvision registers shapes for operators that are in a library for GPUs
sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
import transformers  # noqa: E402, F401  also before

names.install("sgl_kernel", "triton", "tvm_ffi")
import sglang  # noqa: E402
from sglang.srt.managers.detokenizer_manager import DetokenizerManager  # noqa: E402
from sglang.srt.state_capturer import base, routed_experts  # noqa: E402

SLOTS = 4096


def without_pinning(*size, pin_memory=False, allocator=None, **kwargs):
    return torch.empty(*size, **kwargs)


def surround(chunk):
    """Put what an engine would have set up around the capturer."""
    if hasattr(base, "ALLOC_MEMORY_FUNCS"):  # 0.5.23
        base.ALLOC_MEMORY_FUNCS = defaultdict(lambda: without_pinning)
        routed_experts.get_schedule = lambda: SimpleNamespace(chunked_prefill_size=chunk)
        routed_experts.get_parallel = lambda: SimpleNamespace(num_dp_ranks=1, attn_tp_size=1)
    else:
        zeros = torch.zeros
        torch.zeros = lambda *size, pin_memory=False, **kwargs: zeros(*size, **kwargs)
        routed_experts.get_global_server_args = lambda: SimpleNamespace(chunked_prefill_size=chunk, dp_size=1)


def collector():
    """SGLang's function that takes the rows of a finished request, and the request's slot as it wants it."""
    try:
        from sglang.srt.managers.scheduler_components import batch_result_processor as module

        owner = next(v for v in vars(module).values() if hasattr(v, "_maybe_collect_routed_experts"))
        return owner._maybe_collect_routed_experts, module
    except ImportError:
        from sglang.srt.managers import scheduler_output_processor_mixin as module

        return module.SchedulerOutputProcessorMixin.maybe_collect_routed_experts, module


def request_of(index, task):
    tokens = task["num_prompt"] + task["num_new"]
    return SimpleNamespace(
        rid=str(index),
        return_routed_experts=True,
        routed_experts_start_len=task["start"],
        origin_input_ids=[0] * task["num_prompt"],
        output_ids_through_stop=[0] * task["num_new"],
        seqlen=tokens,
        req_pool_idx=index,
        kv=SimpleNamespace(req_pool_idx=index),
        cached_tokens=0,
        routed_experts=None,
    )


def forwards(tasks, chunk):
    """(request, first token, last token) of each forward's parts: prompts in chunks, then a token of every request."""
    for index, task in enumerate(tasks):
        for start in range(0, task["num_prompt"], chunk):
            yield [(index, start, min(start + chunk, task["num_prompt"]))]
    longest = max(task["num_new"] for task in tasks)
    for step in range(longest - 1):  # the last sampled token is never run
        parts = [(i, t["num_prompt"] + step, t["num_prompt"] + step + 1) for i, t in enumerate(tasks)]
        yield [part for part in parts if part[2] < tasks[part[0]]["num_prompt"] + tasks[part[0]]["num_new"]]


def main(source, target):
    job = json.loads(Path(source).read_text())
    layers, top_k, chunk, tasks = job["num_layers"], job["top_k"], job["chunk"], job["requests"]
    surround(chunk)
    text_config = SimpleNamespace(num_experts_per_tok=top_k, num_hidden_layers=layers)
    capturer = routed_experts.RoutedExpertsCapturer(
        SimpleNamespace(hf_text_config=text_config),
        num_tokens=SLOTS,
        max_running_requests=len(tasks),
        num_fused_shared_experts=job["shared_experts"],
        device="cpu",
    )
    generator = torch.Generator().manual_seed(0)
    free = torch.randperm(SLOTS, generator=generator)
    slots = torch.zeros(len(tasks), max(len(t["routes"]) for t in tasks) + 1, dtype=torch.int64)
    routes = [torch.tensor(task["routes"]) for task in tasks]
    used = 0
    for parts in forwards(tasks, chunk):
        rows = []
        for index, first, last in parts:
            slots[index, first:last] = free[used : used + last - first]
            used += last - first
            rows.append(routes[index][first:last])
        batch = torch.cat(rows)
        locations = torch.cat([slots[index, first:last] for index, first, last in parts])
        for layer in range(layers):
            if layer not in job["dense_layers"]:
                shared = torch.full((len(batch), job["shared_experts"]), 99)
                capturer.capture(layer, torch.cat([batch[:, layer], shared], dim=1).to(torch.int32))
        forward = SimpleNamespace(out_cache_loc=locations, out_cache_loc_virtual=None)
        output = capturer.on_forward_end(forward, False, None, no_copy_to_cpu=job["overlap"])
        if output is not None:
            output.finalize()

    collect, module = collector()
    module.get_global_experts_capturer = lambda: capturer
    scheduler = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=slots))
    requests = [request_of(index, task) for index, task in enumerate(tasks)]
    for request in requests:
        collect(scheduler, request)
    encode = DetokenizerManager._b64_encode_per_request
    payloads = encode([request.routed_experts for request in requests])
    answers = []
    for payload in payloads:
        extracted = routed_experts.extract_routed_experts_from_meta_info({"meta_info": {"routed_experts": payload}})
        answers.append({"payload": payload, "extracted": extracted.tolist()})
    Path(target).write_text(json.dumps({"sglang": sglang.__version__, "answers": answers}))


main(*sys.argv[1:])
