"""Hypothesis strategies for configurations, requests, arrivals and weights, for anyone's tests.

======================  ==========================================================================
module                  strategies
======================  ==========================================================================
``attention``           `attention_cases`
``configurations``      `scheduler_configs`, `cache_configs`, `engine_configs`
``engine``              `sampling_params`, `request_lists`, `arrivals`, `engine_cases`
``models``              `embedded_models`, `hybrid_models`, `dense_models`, `random_models`
``plans``               `plans`, for a worker's batch alone
``scheduling``          `combinations`, `scheduling`
``scheduling_v0``       `v0_cases`
======================  ==========================================================================

Each is an ordinary strategy::

    from hypothesis import given
    from servespec.conformance.workloads.engine import engine_cases

    @given(engine_cases("engine"))
    def test_my_engine(case): ...

`servespec check` draws from the same strategies with a fixed seed and without a database, so that
a run is told by its seed; what it keeps of a failure is the case, never the seed.
"""
