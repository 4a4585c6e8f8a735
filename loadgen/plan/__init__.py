"""`reprise plan`: the machines that a workload needs."""
