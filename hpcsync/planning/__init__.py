"""Pure numerics: what workers should do next, computed from measurements.

Like the paradigms, which use it, this package needs only the standard library and NumPy: no clock, files or
communication. Its modules are::

    speed_estimator     predicts a worker's speed and the time of its next iteration
    batch_allocation    divides the samples of a step by these estimates
    k_controller        chooses the number of contributions per update
    local_steps         chooses a worker's local steps between pushes and the share of a push that it sends
    commit_rate_search  searches for the number of commits per period
    layer_groups        groups of workers under layer separation
    split_cost          sizes and times of a model cut in two
    stanza_planner      chooses the number of workers for the layers above the cut
    checks              type checks of numbers
"""
