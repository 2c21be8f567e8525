"""Who computes, how long we wait, how stale a result may be."""
