"""The policy `car`: the scheduler of the paper CaR (§III-B), as far as the paper says it. Requests start by transfer
class (`classes.py`) inside a shuffled window (`window.py`). A prefetch timer (`timer.py`) begins their loads, and
scores tell the cache which KV leaves HBM last (`timed_loads.py`). The rest of the scheduler does not know of it.

The cache has the other half: it keeps the scores (`experiment.scores`), and offloads above 90 % of HBM (§III-C-2;
`experiment.hbm_high_water 0.9`). The length of an answer is predicted from answers that have ended, and not by the
language model as in the paper."""
