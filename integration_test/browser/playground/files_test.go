package playground_test

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestThePageAsksForItsFilesOnly counts what the browser sends.
func TestThePageAsksForItsFilesOnly(t *testing.T) {
	t.Parallel()
	url := serve(t)
	p := open(t, url)
	p.press(t, "n. ")
	p.press(t, " ]d")
	for _, asked := range p.watch.Requests() {
		if asked != "about:blank" && asked != "data:," {
			require.Regexp(t, "^"+url+`([a-z]+\.(js|css))?$`, asked)
		}
	}
}
