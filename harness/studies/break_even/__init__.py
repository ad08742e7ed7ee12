"""From which model size and response length a rollout precision pays end to end, by the measured cost of a step.

    records -> step costs (seconds per stage, parameters, response tokens) -> a law per stage and arm -> T_ctl / T_q > 1
            -> learning curves -> steps to an accuracy, and with the cost of a step the time to it

    costs.py              the cost of a policy step of a run
    laws.py               laws of that cost in size and length
    answer.py             the answer for one arm
    time_to_accuracy.py   steps to an accuracy
    hardware.py           sizes that no run here trains
    report.py             the table, and the answer in words
    figure.py             the figure

Generation gets cheaper in a low precision and the push of weights dearer, while scoring and the update cost what they
cost, so what counts is the whole step. Evaluation is left out: it is how we look, not how we train. So are sweeps on
the embedded engine, which emulates formats in torch and is slower in them by construction. Runs that could share a
GPU have steps to an accuracy alone, no speeds: their seconds are those of whatever ran beside them.
"""
