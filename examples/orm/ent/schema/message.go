// Package schema has the entities of the example for ent.
package schema

import (
	"entgo.io/ent"
	"entgo.io/ent/dialect/entsql"
	"entgo.io/ent/schema"
	"entgo.io/ent/schema/field"
)

// Message is what somebody sent.
type Message struct{ ent.Schema }

// Fields returns what is kept of it.
func (Message) Fields() []ent.Field {
	return []ent.Field{field.String("author"), field.String("body")}
}

// Annotations names the table.
func (Message) Annotations() []schema.Annotation {
	return []schema.Annotation{entsql.Annotation{Table: "messages"}}
}
