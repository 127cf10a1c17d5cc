//! Structs of the control interface that one declaration gives: the struct, its metrics
//! ([`nowait::counts!`]), and its schema in `docs/control.openapi.json`.
//!
//! Invariant: the schemas of the document are those of the declarations; a test compares and, with
//! `NOWAIT_WRITE_DOCS=1`, writes them.

/// Declares a struct with its name in the document: the fields as of `nowait::counts!`.
macro_rules! described {
    (
        $(#[$meta:meta])*
        pub struct $name:ident as $schema:literal {
            $(
                #[doc = $doc:literal]
                $(#[$attr:meta])*
                pub $field:ident: $ty:ty $(=> $kind:ident $metric:literal $($unit:literal)?)?
            ),* $(,)?
        }
    ) => {
        nowait::counts! {
            $(#[$meta])*
            pub struct $name {
                $(
                    #[doc = $doc]
                    $(#[$attr])*
                    pub $field: $ty $(=> $kind $metric $($unit)?)?
                ),*
            }
        }

        #[cfg(test)]
        impl crate::described_structs::openapi::Schema for $name {
            fn schema() -> crate::described_structs::openapi::Type {
                crate::described_structs::openapi::Type::reference($schema)
            }
        }

        #[cfg(test)]
        impl crate::described_structs::openapi::Described for $name {
            const NAME: &'static str = $schema;

            fn properties() -> Vec<crate::described_structs::openapi::Property> {
                let mut properties = Vec::new();
                $(
                    <$ty as crate::described_structs::openapi::Schema>::schema()
                        .add_to(&mut properties, stringify!($field), $doc);
                )*
                properties
            }
        }
    };
}

pub(crate) use described;

#[cfg(test)]
pub(crate) mod openapi {
    use std::collections::BTreeMap;
    use std::path::Path;

    use nowait::internal::{CountValue, Counted};
    use nowait_remote::{LinkCounts, MemoryCounts, StoreCounts};
    use nowait_testkit::written_docs::assert_part;
    use serde_json::{Value, json};

    use crate::api::{BucketInfo, ErrnoInfo, LatencyInfo, LimitsInfo};
    use crate::backup_api::BackupInfo;
    use crate::counted_api::{
        ExportInfo, FrontendInfo, NbdServerInfo, OperationInfo, ServerInfo, StoreInfo,
    };
    use crate::move_api::{MoveInfo, ReplicationInfo};

    /// The type of a field.
    pub(crate) enum Type {
        /// Its schema, and whether it may be absent.
        Of(Value, Presence),
        /// The properties of another struct, in place of a field.
        Flattened(Vec<Property>),
    }

    #[derive(Clone, Copy, PartialEq, Eq)]
    pub(crate) enum Presence {
        Required,
        Optional,
    }

    /// The name of a property, its schema, and whether it may be absent.
    pub(crate) type Property = (&'static str, Value, Presence);

    pub(crate) trait Schema {
        fn schema() -> Type;
    }

    pub(crate) trait Described {
        const NAME: &'static str;
        fn properties() -> Vec<Property>;
    }

    impl Type {
        pub(crate) fn reference(name: &str) -> Self {
            Self::of(json!({"$ref": format!("#/components/schemas/{name}")}))
        }

        const fn of(schema: Value) -> Self {
            Self::Of(schema, Presence::Required)
        }

        /// The schema of a member of an array or a map.
        fn of_member(self) -> Value {
            match self {
                Self::Of(schema, _) => schema,
                Self::Flattened(_) => panic!("a member is not flattened"),
            }
        }

        pub(crate) fn add_to(self, properties: &mut Vec<Property>, name: &'static str, doc: &str) {
            let (mut schema, presence) = match self {
                Self::Of(schema, presence) => (schema, presence),
                Self::Flattened(all) => return properties.extend(all),
            };
            if schema.get("$ref").is_some() {
                // A reference has no text of its own (OpenAPI 3.0, "Reference Object").
                schema = json!({"allOf": [schema]});
            }
            schema["description"] = doc.trim().trim_end_matches('.').replace('`', "").into();
            properties.push((name, schema, presence));
        }
    }

    macro_rules! schemas {
        ($($ty:ty => $schema:expr;)*) => {
            $(impl Schema for $ty {
                fn schema() -> Type {
                    $schema
                }
            })*
        };
    }

    schemas! {
        u64 => Type::of(json!({"type": "integer", "format": "int64", "minimum": 0}));
        u32 => u64::schema();
        f64 => Type::of(json!({"type": "number"}));
        bool => Type::of(json!({"type": "boolean"}));
        String => Type::of(json!({"type": "string"}));
        BucketInfo => Type::reference("Bucket");
        ErrnoInfo => Type::reference("Errno");
        LatencyInfo => Type::reference("Latency");
        LimitsInfo => Type::reference("Limits");
        MemoryCounts => flattened::<Self>();
        LinkCounts => flattened::<Self>();
        StoreCounts => flattened::<Self>();
    }

    impl<T: Schema> Schema for Vec<T> {
        fn schema() -> Type {
            Type::of(json!({"type": "array", "items": T::schema().of_member()}))
        }
    }

    impl<T: Schema> Schema for BTreeMap<String, T> {
        fn schema() -> Type {
            let member = T::schema().of_member();
            Type::of(json!({"type": "object", "additionalProperties": member}))
        }
    }

    impl<T: Schema> Schema for Option<T> {
        fn schema() -> Type {
            Type::Of(T::schema().of_member(), Presence::Optional)
        }
    }

    /// The counts of `T`, in place of the field that has them.
    fn flattened<T: Counted + Default>() -> Type {
        let mut properties = Vec::new();
        for count in T::COUNTS {
            let schema = match (count.get)(&T::default()) {
                CountValue::Integer(_) => u64::schema(),
                CountValue::Float(_) => f64::schema(),
                CountValue::Flag(_) => bool::schema(),
            };
            schema.add_to(&mut properties, count.field, count.help);
        }
        Type::Flattened(properties)
    }

    /// The schema of `T`, with its name in the document.
    fn named<T: Described>() -> (&'static str, Value) {
        let properties = T::properties();
        let required = properties.iter().filter(|(.., presence)| *presence == Presence::Required);
        let required: Vec<_> = required.map(|(name, ..)| *name).collect();
        let properties: serde_json::Map<_, _> = properties
            .iter()
            .map(|(name, schema, _)| ((*name).to_owned(), schema.clone()))
            .collect();
        let schema = json!({"type": "object", "required": required, "properties": properties});
        (T::NAME, schema)
    }

    #[test]
    fn the_schemas_of_the_document_are_those_of_the_declarations() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/control.openapi.json");
        for (name, schema) in [
            named::<ServerInfo>(),
            named::<StoreInfo>(),
            named::<NbdServerInfo>(),
            named::<ExportInfo>(),
            named::<BackupInfo>(),
            named::<MoveInfo>(),
            named::<ReplicationInfo>(),
            named::<FrontendInfo>(),
            named::<OperationInfo>(),
        ] {
            let text = format!("\"{name}\": {}", serde_json::to_string_pretty(&schema).unwrap());
            let text = text.replace('\n', "\n      ");
            let begin = format!("\"{name}\": {{");
            assert_part(&path, (&begin, "\n      }"), &text);
        }
    }
}
