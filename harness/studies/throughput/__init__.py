"""The throughput map of bare vLLM: model size x context length x precision x batch size, on dummy weights.

    sweeps/throughput_*.yaml -> plan: jobs, what is missing -> driver: one process per GPU, one child per engine
      -> worker: one engine load serves every cell, results/throughput/<sweep>/<size>-<precision>.json after each
      -> report: tables, figures, claimed against measured

Left out: training, weight sync, real weights and acceptance of quality. Throughput does not depend on values.
"""
