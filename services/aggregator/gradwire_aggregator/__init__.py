"""The aggregator: takes contributions, averages them round by round, and hands the aggregate to every worker."""
