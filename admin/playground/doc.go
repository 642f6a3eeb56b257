// Package playground is a page that shows rate limits at work: a token bucket beside a fixed window and a leaky bucket,
// under the same load, in simulated time that you can slow down, stop and step. It needs no server and sends nothing.
// The module of package middleware/httplimit/client makes every decision, so the page shows the decisions that a
// Limiter would make.
//
// To serve it, mount Handler below any prefix that ends with a slash:
//
//	mux.Handle("/playground/", playground.Handler())
//
// To host it with documentation, write it as one file:
//
//	err := playground.WriteHTML(file)
//
// A link carries the example, the settings that differ from it, and the instant. All are in its fragment, which
// browsers send to no server.
//
// The files are in web/. simulate.js sends the requests of load.js to the limits, and presets.js has the examples.
// Neither touches the page, so a test plays the whole history of each example and compares it with Go's. player.js is
// simulated time. lane.js, bucket.js and strip.js draw an instant of a history, controls.js and keys.js handle the
// mouse and the keyboard, and main.js starts everything. settings.js lists the settings, and reads and writes links.
package playground
