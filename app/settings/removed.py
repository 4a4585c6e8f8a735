"""Settings that earlier versions had, so that an old file or script is told what happens now."""

REMOVED_IN = "0.3"
_EXPERIMENT = "it is for benchmarks alone now, as experiment."
REMOVED = {
    "cache.disk_packing": "rows lie on disk as they are",
    "cache.granularity": "sessions leave a tier one after the other",
    "scheduler.class_ordered_entry": "requests enter the window by fair share and arrival",
    "scheduler.length_predictor": "lengths of answers are learned",
    **{
        f"{section}.{key}": f"{_EXPERIMENT}{key}"
        for section, keys in {
            "cache": (
                *("hbm_high_water", "hbm_low_water", "staging_mib", "read_buffer_layers", "truncation_mode"),
                *("dram_gbps", "disk_gbps", "io_deadline_s", "sync_save"),
            ),
            "scheduler": ("window", "scores", "chunked_prefill"),
        }.items()
        for key in keys
    },
}
"""Name -> what happens instead."""
