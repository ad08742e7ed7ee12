"""The throughput map of bare vLLM: model size x context length x precision x batch size, on dummy weights.

    sweeps/throughput_*.yaml -> plan: engines, what is missing -> driver: one process per GPU, one child per engine
      -> worker: one engine load serves every cell, results/throughput/<sweep>/<size>-<precision>.json after each
      -> report: tables and figures

    map_cells.py          cells of the map, as result files keep them
    plan.py               cells and engines of a sweep, and what is still missing
    shapes.py             Qwen2.5 by size, and the plans of precisions
    estimates.py          fit, room for cache and measuring time, before an engine is loaded
    driver.py             one engine process per GPU
    cores.py              cores of the host, shared out between engine processes
    worker.py             one engine process
    engine_arguments.py   arguments of `vllm.LLM` for one size and precision
    loading.py            the start of one engine, and its log
    connector.py          a KV connector that gives requests a context without a prefill
    stepping.py           an engine driven step by step, tokens counted
    measure.py            a cell, prefill, the time inside a step, a whole generation
    records.py            one result file per engine
    settled.py            disturbed cells, and the better of two measurements
    waiting.py            cells in which the GPU waits for the host
    trust.py              checks of the map: dummy contexts against real ones, steps against whole generations
    cost.py               whole generations, ratios to BF16 and crossings from measured steps
    factors.py            a precision's rate over another's, with the range of the neighbouring cells
    tables.py             tables
    figures.py            figures
    headline.py           the figure of a README: decode rate over BF16 by batch
    report.py             the command's tables and figures, written

Left out: training, weight sync, real weights and acceptance of quality. Throughput does not depend on values.
"""
