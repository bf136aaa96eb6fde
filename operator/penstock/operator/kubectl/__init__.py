"""Commands for people who look after models in a cluster: `penstock status`, `top`, `events`, `drain`. kubectl has them too, as
`kubectl penstock …`."""
