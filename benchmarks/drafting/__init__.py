"""What `bench_speculation` is made of."""
