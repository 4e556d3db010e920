"""Sample with vLLM on the CPU and write what it returns.

Run in vLLM's environment: `python vllm_sample.py job.json out.json routes.npz`. In: `model` (folder), `dtype`,
`prompts` (token ids), `new_tokens`, `seed`, `eager`. Out: `vllm` (version) and per prompt `output_ids` and `log_probs`
[nats] of the sampled tokens, and the routes as they are in an archive, by the number of the prompt.
"""

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
import numpy as np
import vllm


def main(source, target, archive):
    job = json.loads(Path(source).read_text())
    engine = vllm.LLM(
        model=job["model"],
        dtype=job["dtype"],
        enforce_eager=job["eager"],
        enable_return_routed_experts=True,
        seed=job["seed"],  # of the engine: a seed of a request and prompts in chunks fail on a CPU
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,  # long prompts come in chunks
        disable_log_stats=True,
    )
    params = vllm.SamplingParams(temperature=1.0, max_tokens=job["new_tokens"], logprobs=0, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], params, use_tqdm=False)
    answers, routes = [], {}
    for index, output in enumerate(outputs):
        completion = output.outputs[0]
        log_probs = [step[token].logprob for token, step in zip(completion.token_ids, completion.logprobs, strict=True)]
        answers.append({"output_ids": list(completion.token_ids), "log_probs": log_probs})
        routes[str(index)] = np.asarray(completion.routed_experts)
    np.savez(archive, **routes)
    Path(target).write_text(json.dumps({"vllm": vllm.__version__, "answers": answers}))


if __name__ == "__main__":
    main(*sys.argv[1:])
