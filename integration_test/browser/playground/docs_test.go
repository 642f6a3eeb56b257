package playground_test

import (
	"os"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestTheDocumentedLinks opens the links of docs/admin.md.
func TestTheDocumentedLinks(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../../docs/admin.md")
	require.NoError(t, err)
	url := serve(t)
	p := open(t, url)
	links := regexp.MustCompile("`(#[^`]+)`").FindAllSubmatch(text, -1)
	require.Len(t, links, 2)
	for _, link := range links {
		p.goTo(t, url+string(link[1]))
		require.True(t, play[bool](t, p, `return document.getElementById('refused').hidden;`), string(link[1]))
		require.Equal(t, url+string(link[1]), play[string](t, p, `return location.href;`))
	}
}
