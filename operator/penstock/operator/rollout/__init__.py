"""How a change reaches the replicas: revisions that never render twice, and a pace that follows the free capacity."""
